"""Owns the registry of tool and reasoning formats, and the choice of the formats that a model uses.

To add a format: a leaf module like its neighbours, a line in a registry, examples in tests/chat/answers.py.
"""

from __future__ import annotations

from typing import Any

from outrider.chat.formats import (
    deepseek,
    gemma,
    glm,
    harmony,
    hermes,
    invoke,
    kimi,
    lfm2,
    llama3,
    mistral,
    qwen3_coder,
    think,
)
from outrider.chat.formats.reasoning_format import ReasoningFormat
from outrider.chat.formats.tool_format import ToolFormat

# The first format whose pattern is found in the template is used: more specific formats come first.
TOOL_FORMATS: dict[str, ToolFormat] = {
    "harmony": harmony.FORMAT,
    "minimax": invoke.MINIMAX,
    "deepseek_v32": invoke.DEEPSEEK,
    "gemma4": gemma.GEMMA4,
    "function_gemma": gemma.FUNCTION_GEMMA,
    "longcat": glm.LONGCAT,
    "glm": glm.FORMAT,
    "qwen3_coder": qwen3_coder.FORMAT,
    "kimi": kimi.FORMAT,
    "deepseek_v3": deepseek.FENCED,
    "deepseek": deepseek.FORMAT,
    "lfm2": lfm2.FORMAT,
    "mistral": mistral.FORMAT,
    "mistral_list": mistral.LISTED,
    "hermes": hermes.FORMAT,
    "llama3": llama3.FORMAT,
    "gemma3": gemma.GEMMA3,
}
DEFAULT_TOOL_FORMAT = hermes.FORMAT  # for a model without a tool format of its own

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "harmony": harmony.REASONING,
    "gemma4": think.GEMMA4,
    "longcat_think": think.LONGCAT,
    "seed_think": think.SEED,
    "magistral": think.MAGISTRAL,
    "think": think.THINK,
}


def detect(template: str, tokenizer: Any) -> tuple[ToolFormat | None, ReasoningFormat | None]:
    """The formats that a chat template uses. If there is no template, the tokenizer's added tokens decide."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    source = template or "\n".join(added)
    tool = next((format for format in TOOL_FORMATS.values() if format.template_pattern.search(source)), None)
    reasoning = next(
        (format for format in REASONING_FORMATS.values() if format.template_pattern.search(source)), None
    )
    if reasoning is None:
        marked = (f for f in REASONING_FORMATS.values() if {f.opening, f.closing} <= added)
        reasoning = next(marked, None)
    return tool, reasoning
