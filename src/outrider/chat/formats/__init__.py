"""Owns the registry of tool and reasoning formats, and the choice of the formats that a model uses.

To add a format: a leaf module like its neighbours, a line in a registry, examples in tests/chat/answers.py.
"""

from __future__ import annotations

from typing import Any

from outrider.chat.formats import (
    apertus,
    cohere,
    deepseek,
    gemma,
    gigachat,
    glm,
    granite,
    harmony,
    hermes,
    hunyuan,
    inkling,
    internlm,
    invoke,
    jamba,
    k2_horizon,
    kimi,
    kimi_k3,
    lfm2,
    llama3,
    minicpm5,
    minimax_m3,
    mistral,
    nemotron,
    phi4,
    plamo,
    pythonic,
    qwen3_coder,
    seed_oss,
    solar,
    solar_open,
    think,
    xlam,
)
from outrider.chat.formats.reasoning_format import ReasoningFormat
from outrider.chat.formats.tool_format import ToolFormat
from outrider.config import InvalidConfig

# The first format whose pattern is found in the template is used: more specific formats come first.
TOOL_FORMATS: dict[str, ToolFormat] = {
    "harmony": harmony.FORMAT,
    "minimax_m3": minimax_m3.FORMAT,
    "minimax": invoke.MINIMAX,
    "muse": invoke.MUSE,
    "step3": invoke.STEP3,
    "dots": invoke.DOTS,
    "deepseek_v32": invoke.DEEPSEEK,
    "deepseek_v4": invoke.DEEPSEEK_V4,
    "deepseek_v41": invoke.DEEPSEEK_V41,
    "inkling": inkling.FORMAT,
    "solar_open": solar_open.FORMAT,
    "solar_open2": solar.FORMAT,
    "plamo3": plamo.FORMAT,
    "k2_horizon": k2_horizon.FORMAT,
    "kimi_k3": kimi_k3.FORMAT,
    "gemma4": gemma.GEMMA4,
    "function_gemma": gemma.FUNCTION_GEMMA,
    "longcat": glm.LONGCAT,
    "hy_v3": hunyuan.HY_V3,
    "hy_v4": hunyuan.HY_V4,
    "glm": glm.FORMAT,
    "seed_oss": seed_oss.FORMAT,
    "qwen3_coder": qwen3_coder.FORMAT,
    "minicpm5": minicpm5.FORMAT,
    "kimi": kimi.FORMAT,
    "deepseek_v3": deepseek.FENCED,
    "deepseek": deepseek.FORMAT,
    "lfm2": lfm2.FORMAT,
    "mistral": mistral.FORMAT,
    "mistral_list": mistral.LISTED,
    "cohere": cohere.FORMAT,
    "apertus": apertus.FORMAT,
    "internlm": internlm.FORMAT,
    "gigachat3": gigachat.FORMAT,
    "nemotron": nemotron.FORMAT,
    "jamba": jamba.FORMAT,
    "minimax_m1": jamba.MINIMAX_M1,
    "olmo3": pythonic.OLMO3,
    "granite": granite.FORMAT,
    "granite_20b_fc": granite.GRANITE_20B,
    "phi4_mini": phi4.FORMAT,
    "hermes": hermes.FORMAT,
    "pythonic": pythonic.FORMAT,
    "llama3": llama3.FORMAT,
    "xlam": xlam.FORMAT,
    "gemma3": gemma.GEMMA3,
}
DEFAULT_TOOL_FORMAT = hermes.FORMAT  # for a model without a tool format of its own

# Names of parsers in vLLM, SGLang and mlx-lm for formats that have another name here.
TOOL_PARSER_NAMES = {
    "openai": "harmony",
    "gpt-oss": "harmony",
    "minimax_m2": "minimax",
    "minimax-m2": "minimax",
    "minimax-m3": "minimax_m3",
    "muse_spark": "muse",
    "musespark1x": "muse",
    "muse_glimmer": "muse",
    "atem": "muse",
    "deepseek_v31": "deepseek",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "deepseekv41": "deepseek_v41",
    "functiongemma": "function_gemma",
    "glm45": "glm",
    "glm47": "glm",
    "ling3": "glm",
    "spark25": "glm",
    "laguna": "glm",
    "poolside_v1": "glm",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "step5": "qwen3_coder",
    "nanbeige": "qwen3_coder",
    "mimo": "qwen3_coder",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_json": "hermes",
    "ernie45": "hermes",
    "trinity": "hermes",
    "granite4": "hermes",
    "json_tools": "hermes",
    "granite-20b-fc": "granite_20b_fc",
    "kimi_k2": "kimi",
    "llama3_json": "llama3",
    "llama4_json": "llama3",
    "llama4_pythonic": "pythonic",
    "hunyuan_a13b": "jamba",
    "hunyuan": "hy_v3",
    "interns1": "internlm",
    "apertus2509": "apertus",
    "cohere2_moe": "cohere",
    "cohere_command3": "cohere",
    "cohere_command4": "cohere",
    "phi4_mini_json": "phi4_mini",
}
# Parsers of vLLM and SGLang that are not supported, and why.
_RESPONSE_TEMPLATE = (
    "it reads calls with the response_template in a checkpoint's tokenizer_config.json, which Outrider does "
    "not read. Leave the parser out, or use the one of the model's format"
)
UNSUPPORTED_TOOL_PARSERS = {
    "hf": _RESPONSE_TEMPLATE,
    "response_template": _RESPONSE_TEMPLATE,
    "beam": _RESPONSE_TEMPLATE,
}

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "harmony": harmony.REASONING,
    "gemma4": think.GEMMA4,
    "longcat_think": think.LONGCAT,
    "seed_think": think.SEED,
    "magistral": think.MAGISTRAL,
    "minimax_m3": think.MINIMAX_M3,
    "kimi_k3": kimi_k3.REASONING,
    "muse": invoke.MUSE_REASONING,
    "inkling": inkling.REASONING,
    "solar_open": solar_open.REASONING,
    "solar_open2": solar.REASONING,
    "plamo3": plamo.REASONING,
    "k2_horizon": k2_horizon.REASONING,
    "cohere": think.COHERE,
    "ernie45": think.ERNIE,
    "think": think.THINK,
}


def tool_format_named(name: str) -> ToolFormat:
    """The format of this name, here or in vLLM, SGLang or mlx-lm. Raises InvalidConfig."""
    found = TOOL_FORMATS.get(TOOL_PARSER_NAMES.get(name, name))
    if found is not None:
        return found
    known = ", ".join(sorted([*TOOL_FORMATS, *TOOL_PARSER_NAMES]))
    if name in UNSUPPORTED_TOOL_PARSERS:
        raise InvalidConfig(f"--tool-call-parser {name} is not supported: {UNSUPPORTED_TOOL_PARSERS[name]}")
    raise InvalidConfig(f"--tool-call-parser {name} is unknown: leave it out, or use one of {known}")


def _tool_format(source: str) -> ToolFormat | None:
    return next((format for format in TOOL_FORMATS.values() if format.template_pattern.search(source)), None)


def detect(template: str, tokenizer: Any) -> tuple[ToolFormat | None, ReasoningFormat | None]:
    """The formats that a chat template uses. Where it shows none, the tokenizer's added tokens decide."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    tokens = "\n".join(added)
    source = template or tokens
    tool = _tool_format(source) or _tool_format(tokens)
    reasoning = next(
        (format for format in REASONING_FORMATS.values() if format.template_pattern.search(source)), None
    )
    if reasoning is None:
        marked = (f for f in REASONING_FORMATS.values() if {f.opening, f.closing, *f.layout} <= added)
        reasoning = next(marked, None)
    return tool, reasoning
