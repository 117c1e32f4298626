"""Reasoning between a pair of tags, as most reasoning models write it, each with its own tags."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from outrider.chat.formats.reasoning_format import ReasoningFormat

THINK = ReasoningFormat("think", re.compile("</?think>"), "<think>", "</think>", blanks=("\n", "\n\n"))
LONGCAT = ReasoningFormat(
    "longcat_think", re.compile("<longcat_think>"), "<longcat_think>", "</longcat_think>"
)
SEED = ReasoningFormat("seed_think", re.compile("<seed:think>"), "<seed:think>", "</seed:think>")
MAGISTRAL = ReasoningFormat("magistral", re.compile(r"\[THINK\]"), "[THINK]", "[/THINK]")
MINIMAX_M3 = ReasoningFormat("minimax_m3", re.compile("<mm:think>"), "<mm:think>", "</mm:think>")
GEMMA4 = ReasoningFormat("gemma4", re.compile(r"<\|channel>"), "<|channel>thought", "<channel|>")
# ERNIE 4.5: the answer is between tags too.
ERNIE = replace(
    THINK,
    name="ernie45",
    template_pattern=re.compile("(?s)(?=.*</think>).*<response>"),
    layout=("<response>", "</response>"),
)
COHERE = ReasoningFormat(
    "cohere",
    re.compile(r"<\|START_THINKING\|>"),
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    layout=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
_SUFFIXED = re.compile(r"<think(:[^\s<>]+)>")


def for_tokens(format: ReasoningFormat | None, tokens: Collection[str]) -> ReasoningFormat | None:
    """The format with a tokenizer's own tags: those of Hunyuan's checkpoints end in a suffix."""
    if format not in (None, THINK) or {THINK.opening, THINK.closing} <= set(tokens):
        return format
    for match in filter(None, map(_SUFFIXED.fullmatch, tokens)):
        opening, closing = f"<think{match[1]}>", f"</think{match[1]}>"
        if closing in tokens:
            return replace(THINK, opening=opening, closing=closing)
    return format
