"""The table of supported model families, and the reasons why other families are refused.

A family is mlx-lm's module name for a `model_type`. To add a family, add a name here and a tiny model in
tests/tiny_models.py; the test compares logits of ragged rows with a from-scratch run. A checkpoint of a
supported family can still be refused when its trunk is built, if its config requires arithmetic that depends
on all rows together (a "dynamic" rope, for example).
"""

from __future__ import annotations

from collections.abc import Mapping

from outrider.models.encoders.families import ENCODERS
from outrider.models.errors import ModelUnavailable


class UnsupportedModel(ModelUnavailable):
    """The model cannot be served exactly. The message gives the reason."""

    reason = ""


SUPPORTED: frozenset[str] = frozenset({
    "afmoe", "apertus", "bailing_moe", "bailing_moe_v3", "cohere", "cohere2", "dbrx", "deepseek",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5", "ernie4_5_moe", "exaone", "exaone4",
    "exaone_moe", "falcon_h1", "gemma", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "glm", "glm4",
    "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt2", "gpt_oss", "gptj", "granite", "granitemoe",
    "granitemoehybrid", "helium", "hunyuan", "hunyuan_v1_dense", "internlm2", "internlm3",
    "iquestloopcoder", "kimi_k25", "kimi_linear", "kimi_vl", "Klear", "laguna", "lfm2", "lfm2-vl",
    "lfm2_moe", "llama", "llama4_text", "longcat_flash", "mamba2", "mellum", "mimo", "mimo_v2_flash",
    "minicpm", "minicpm3", "minimax", "ministral3", "mistral3", "mistral4", "mixtral", "muse_glimmer",
    "nanbeige", "nanochat", "nemotron", "nemotron-nas", "nemotron_h", "olmo2", "olmo3", "olmo_hybrid",
    "olmoe", "openelm", "phi", "phi3", "phimoe", "pixtral", "plamo", "plamo3", "qwen", "qwen2", "qwen2_moe",
    "qwen2_vl", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe",
    "seed_oss", "smollm3", "solar_open", "spark2_5", "stablelm", "starcoder2", "step3p5", "talkie",
    "telechat3", "youtu_llm",
})  # fmt: skip

RECURRENT = "its recurrent layers have a state that Outrider cannot roll back per row yet"
MEDIA = "its language model has not been checked without its vision and audio encoders"
ENCODER = "it is an encoder, which generates no text: `outrider serve` makes embeddings with it"
LOGITS_ONLY = "its mlx-lm definition returns logits only, and drafting needs hidden states"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "bailing_hybrid", "bailing_moe_linear", "baichuan_m1", "gear", "jamba", "kimi_k3", "mamba",
            "plamo2", "prism_hadamard_qwen35", "recurrent_gemma", "rwkv7",
        ),
        RECURRENT,
    ),
    **dict.fromkeys(("gemma3n", "minimax_m3_vl", "muse_spark"), MEDIA),
    **dict.fromkeys(("gpt_neox", "lille-130m", "olmo"), LOGITS_ONLY),
    "afm7": "its last layers take their positions from the length of the buffers, which all rows share",
    "bitnet": "its ternary matrix products run on Metal only and have not been checked with per-row caches",
    "deepseek_v41": "its compressed attention stores pending blocks that cannot be rolled back per row",
    "gemma2": "its attention applies the rows' masks to groups of heads, so rows would mix their masks",
    "gpt_bigcode": "it takes one position for all rows of a batch",
    "llama4": "its chunked attention drops cache cells that a rejected draft would need again",
    "longcat_flash_ngram": "it stores the last tokens of only one row for its n-gram embeddings",
    "phi3small": "its block-sparse attention depends on the length of the buffers, which all rows share",
    "phixtral": "it builds one mask for all rows, outside its stack of layers",
}  # fmt: skip


def check_supported(family: str) -> None:
    """Raise UnsupportedModel if rows of this family cannot be rolled back exactly."""
    if family not in SUPPORTED:
        unknown = ENCODER if family in ENCODERS else "it has not been checked with per-row caches"
        raise unsupported(family, REFUSED.get(family, unknown))


def unsupported(family: str, reason: str) -> UnsupportedModel:
    error = UnsupportedModel(f"model family {family!r} is not served: {reason}.")
    error.reason = reason
    return error
