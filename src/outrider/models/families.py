"""Which model families are served, and why the others are not: one table, read at start.

A family is mlx-lm's module name for a `model_type`. Adding one is a row here and a tiny model in
tests/tiny_models.py, whose ragged logits must equal a from-scratch run. A checkpoint of a served family can
still be refused when its trunk is built, where its config asks for something that depends on all rows at once
(a "dynamic" rope, for example).
"""

from __future__ import annotations

from collections.abc import Mapping

from outrider.models.errors import ModelUnavailable


class UnsupportedModel(ModelUnavailable):
    """The model cannot be served exactly; the message says what stands in the way."""


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

RECURRENT = "it has recurrent layers of a kind whose state cannot be rolled back per row yet"
MEDIA = "its language model is not one that has been checked apart from its eyes and ears"
LOGITS_ONLY = "its stack hands out logits, not the hidden states that drafting needs"

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
    "afm7": "its last layers take their positions from the length of the buffers, one for all rows",
    "bitnet": "its ternary products run on Metal only, where they have not been checked with per-row caches",
    "deepseek_v41": "its compressed attention keeps pending blocks that cannot be rolled back per row",
    "gemma2": "its attention lines the rows' masks up with groups of heads, so rows would use each other's",
    "gpt_bigcode": "it takes one position for all rows of a batch",
    "llama4": "its chunked attention drops cells that a rejected draft would need back",
    "longcat_flash_ngram": "it keeps the last tokens of one row for its n-gram embeddings",
    "phi3small": "its block-sparse attention lays blocks out by the length of the buffers, one for all rows",
    "phixtral": "it builds its mask outside the stack, for all rows at once",
}  # fmt: skip


def check_supported(family: str) -> None:
    """Raise UnsupportedModel unless rows of this family can be rolled back exactly."""
    if family not in SUPPORTED:
        raise unsupported(family, REFUSED.get(family, "it has not been checked with per-row caches"))


def unsupported(family: str, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"model family {family!r} is not served: {reason}.")
