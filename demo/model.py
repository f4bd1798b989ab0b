"""A tiny random-weight Qwen3 with a byte-level tokenizer, made in a folder without network.

The weights come from a fixed seed, so two engines (and two runs) give the same greedy output.
One token's KV is 1 KiB: 4 layers x key and value x 2 heads x 32 dims x 2 bytes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SEED = 20
VOCABULARY = 512
MAX_TOKENS = 4096
END = "<|endoftext|>"

# Wide enough that the greedy token depends on the whole prompt: KV that arrives damaged shows in the text.
WEIGHT_STD = 0.12

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_TOKENS,
    "initializer_range": WEIGHT_STD,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": VOCABULARY - 1,
    "torch_dtype": "bfloat16",
}

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_model(folder: Path, changes: Mapping[str, int] = MappingProxyType({})) -> Path:
    """Write the model into `folder` unless there is one already; returns `folder`.

    Safe against a second process doing the same: the files appear in one rename.

    Args:
        changes: to `CONFIG`, such as a larger hidden_size.
    """
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=folder.name + ".", dir=folder.parent) as made:
        part = Path(made) / "model"
        part.mkdir()
        _write_tokenizer(part)
        config = {**CONFIG, **changes}
        _write_weights(part, config)
        (part / "config.json").write_text(json.dumps(config, indent=1))
        try:
            os.rename(part, folder)
        except OSError:
            if not (folder / "config.json").exists():
                raise
    return folder


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Every two-letter pair of the alphabet occurs, so that there are more merges than places.
    letters = "etaoinshrdlucmfwypvbgk"
    words = [a + b + c for a in letters for b in letters for c in letters[:6]]
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    tokenizer.add_special_tokens([END])
    assert tokenizer.get_vocab_size() == VOCABULARY
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": END,
                "pad_token": END,
                "model_max_length": MAX_TOKENS,
                "chat_template": CHAT_TEMPLATE,
                "clean_up_tokenization_spaces": False,
            }
        )
    )


def _write_weights(folder: Path, config: Mapping[str, Any]) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(SEED)

    def noise(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * WEIGHT_STD).to(torch.bfloat16)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    weights = {
        "model.embed_tokens.weight": noise(VOCABULARY, hidden),
        "model.norm.weight": ones(hidden),
        "lm_head.weight": noise(VOCABULARY, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        weights |= {
            at + "input_layernorm.weight": ones(hidden),
            at + "post_attention_layernorm.weight": ones(hidden),
            at + "self_attn.q_proj.weight": noise(queries, hidden),
            at + "self_attn.k_proj.weight": noise(keys, hidden),
            at + "self_attn.v_proj.weight": noise(keys, hidden),
            at + "self_attn.o_proj.weight": noise(hidden, queries),
            at + "self_attn.q_norm.weight": ones(head),
            at + "self_attn.k_norm.weight": ones(head),
            at + "mlp.gate_proj.weight": noise(inner, hidden),
            at + "mlp.up_proj.weight": noise(inner, hidden),
            at + "mlp.down_proj.weight": noise(hidden, inner),
        }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
