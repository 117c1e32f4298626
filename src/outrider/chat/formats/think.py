"""Reasoning between a pair of tags, as most reasoning models write it, each with its own tags."""

from __future__ import annotations

import re

from outrider.chat.formats.reasoning_format import ReasoningFormat

THINK = ReasoningFormat("think", re.compile("</?think>"), "<think>", "</think>", blanks=("\n", "\n\n"))
LONGCAT = ReasoningFormat(
    "longcat_think", re.compile("<longcat_think>"), "<longcat_think>", "</longcat_think>"
)
SEED = ReasoningFormat("seed_think", re.compile("<seed:think>"), "<seed:think>", "</seed:think>")
MAGISTRAL = ReasoningFormat("magistral", re.compile(r"\[THINK\]"), "[THINK]", "[/THINK]")
MINIMAX_M3 = ReasoningFormat("minimax_m3", re.compile("<mm:think>"), "<mm:think>", "</mm:think>")
GEMMA4 = ReasoningFormat("gemma4", re.compile(r"<\|channel>"), "<|channel>thought", "<channel|>")
