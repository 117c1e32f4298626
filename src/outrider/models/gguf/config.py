"""Makes the `config.json` that mlx-lm's model definitions read from GGUF metadata.

Owns the meaning of the metadata keys for the families that Outrider converts. Refuses keys that would change
the arithmetic. Must not read weights; the caller passes the rope factors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.models.errors import UnreadableGGUF
from outrider.models.gguf.header import Header


@dataclass(frozen=True)
class Family:
    """The differences between the architectures that are converted."""

    model_class: str
    has_interleaved_rope: bool = False  # the file stores the two rows of a rotated pair side by side
    has_free_head_dim: bool = True  # num_heads * head_dim may differ from the hidden size
    has_qk_norm: bool = False
    has_qkv_bias: bool = False


FAMILIES = {
    "llama": Family("LlamaForCausalLM", has_interleaved_rope=True),
    "qwen2": Family("Qwen2ForCausalLM", has_free_head_dim=False, has_qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", has_qk_norm=True),
}

# Keys that require arithmetic which mlx-lm's definitions of the families above do not have.
REFUSED_KEYS = (
    "expert_count",
    "attention.sliding_window",
    "attention.scale",
    "attention.logit_softcapping",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
)

# Constants of all published Llama 3.x models. The file does not hold them; it holds the scaling factor.
LLAMA3_LOW_FREQ_FACTOR = 1.0
LLAMA3_HIGH_FREQ_FACTOR = 4.0
LLAMA3_ORIGINAL_CONTEXT = 8192


def family_of(header: Header) -> Family:
    """Return the family of the file. Raises UnreadableGGUF for a family that is not converted."""
    if int(header.metadata.get("split.count", 0)) > 1:  # type: ignore[arg-type]
        raise UnreadableGGUF(
            "This file is one part of a split GGUF model. Merge the parts into one file first."
        )
    family = FAMILIES.get(header.architecture)
    if family is None:
        raise UnreadableGGUF(
            f"The architecture {header.architecture or '(none given)'!r} cannot be converted from GGUF. "
            f"Convertible: {', '.join(sorted(FAMILIES))}. Use the model's safetensors folder instead."
        )
    return family


def model_config(header: Header, rope_factors: Sequence[float] | None = None) -> dict[str, Any]:
    """Return the content of `config.json`. `rope_factors`: the values of `rope_freqs.weight`, if present."""
    family = family_of(header)
    keys = _Keys(header)
    keys.refuse(REFUSED_KEYS)
    hidden_size = keys.integer("embedding_length")
    num_heads = keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    _check_head(family, keys, hidden_size, num_heads, head_dim)
    rope_theta = keys.number("rope.freq_base", 10000.0)
    config = {
        "architectures": [family.model_class],
        "model_type": header.architecture,
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": rope_theta,
        "vocab_size": vocab_size(header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    if header.architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors
    if scaling := _rope_scaling(keys, rope_factors, head_dim, rope_theta):
        config["rope_scaling"] = scaling
    return config


def vocab_size(header: Header) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UnreadableGGUF(
            "The file has no token embedding (token_embd.weight): it is not a complete model."
        )
    return embedding.shape[0]


class _Keys:
    """Reads metadata keys under the architecture's prefix and checks their types."""

    def __init__(self, header: Header) -> None:
        self._prefix = header.architecture
        self._metadata = header.metadata

    def has(self, key: str) -> bool:
        return f"{self._prefix}.{key}" in self._metadata

    def text(self, key: str, default: str) -> str:
        return str(self._metadata.get(f"{self._prefix}.{key}", default))

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._scalar(key, default))

    def number(self, key: str, default: float | None = None) -> float:
        """Return a float32 as its shortest decimal number: 1e-05, not 9.999999747378752e-06."""
        return float(str(np.float32(self._scalar(key, default))))

    def refuse(self, keys: Sequence[str]) -> None:
        for key in keys:
            if self._metadata.get(f"{self._prefix}.{key}"):
                raise UnreadableGGUF(
                    f"The file sets {self._prefix}.{key}, which conversion from GGUF does not support."
                )

    def _scalar(self, key: str, default: float | None) -> float:
        value = self._metadata.get(f"{self._prefix}.{key}", default)
        if value is None:
            raise UnreadableGGUF(
                f"The file lacks {self._prefix}.{key}: it is damaged or not a complete model."
            )
        if isinstance(value, (list, str)):
            raise UnreadableGGUF(
                f"{self._prefix}.{key} is not one number. Models whose layers differ are not converted."
            )
        return value


def _check_head(family: Family, keys: _Keys, hidden_size: int, num_heads: int, head_dim: int) -> None:
    if not family.has_free_head_dim and num_heads * head_dim != hidden_size:
        raise UnreadableGGUF(f"{num_heads} heads of {head_dim} do not make up the hidden size {hidden_size}.")
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise UnreadableGGUF(
                f"{key} is {keys.integer(key)}, but a head has {head_dim} dimensions: this is not supported."
            )


def _rope_scaling(
    keys: _Keys, rope_factors: Sequence[float] | None, head_dim: int, rope_theta: float
) -> dict[str, Any] | None:
    kind = keys.text("rope.scaling.type", "linear" if keys.has("rope.scale_linear") else "none")
    if rope_factors is not None:
        return _llama3_scaling(rope_factors, head_dim, rope_theta)
    if kind == "none":
        return None
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn_scaling(keys, factor)
    raise UnreadableGGUF(f"Rope scaling of type {kind!r} is not supported.")


def _yarn_scaling(keys: _Keys, factor: float) -> dict[str, Any]:
    if keys.number("rope.scaling.attn_factor", 1.0) != 1.0 or keys.number(
        "rope.scaling.yarn_log_multiplier", 0.0
    ):
        raise UnreadableGGUF("YaRN rope scaling with its own attention factor is not supported.")
    original = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for name in ("beta_fast", "beta_slow"):
        if keys.has(f"rope.scaling.yarn_{name}"):
            scaling[name] = keys.number(f"rope.scaling.yarn_{name}")
    return scaling


def _llama3_scaling(factors: Sequence[float], head_dim: int, rope_theta: float) -> dict[str, Any] | None:
    """Recover the settings of the Llama 3 rule: GGUF stores only the resulting divisor of each frequency."""
    factor = max(factors)
    if all(each == 1.0 for each in factors):
        return None
    expected = [_llama3_divisor(rope_theta ** (2 * i / head_dim), factor) for i in range(head_dim // 2)]
    if not np.allclose(expected, np.asarray(factors), rtol=1e-4, atol=0):
        raise UnreadableGGUF(
            "The file's rope_freqs.weight does not follow the Llama 3 rule: this is not supported."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW_FREQ_FACTOR,
        "high_freq_factor": LLAMA3_HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": LLAMA3_ORIGINAL_CONTEXT,
    }


def _llama3_divisor(period: float, factor: float) -> float:
    """Short waves stay, long waves are divided by `factor`, waves between are blended."""
    turns = LLAMA3_ORIGINAL_CONTEXT / (2 * math.pi * period)
    if turns > LLAMA3_HIGH_FREQ_FACTOR:
        return 1.0
    if turns < LLAMA3_LOW_FREQ_FACTOR:
        return factor
    share = (turns - LLAMA3_LOW_FREQ_FACTOR) / (LLAMA3_HIGH_FREQ_FACTOR - LLAMA3_LOW_FREQ_FACTOR)
    return 1 / ((1 - share) / factor + share)
