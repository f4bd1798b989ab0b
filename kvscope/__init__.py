"""kvscope: where the time to first token goes in vLLM prefill/decode deployments."""

__version__ = "0.1.0"
