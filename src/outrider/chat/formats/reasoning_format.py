"""Owns the description of a reasoning format: the markers around the reasoning. Leaf modules fill it in."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningFormat:
    name: str
    template_pattern: re.Pattern[str]  # found in the chat templates that use this format
    opening: str
    closing: str
    blanks: tuple[str, str] = ("", "")  # what models write before and after the closing
    answer: str = ""  # the marker that starts the answer, if the closing alone does not start it
    inner: tuple[str, ...] = ()  # markers inside the reasoning
    layout: tuple[str, ...] = ()  # markers around the answer: they are removed

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opening, self.closing, self.answer, *self.inner, *self.layout)
