"""What a reasoning format is: the markers around a model's thinking, as data that leaf modules fill in."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningFormat:
    name: str
    sign: re.Pattern[str]  # a chat template that speaks this format
    opening: str
    closing: str
    answer: str = ""  # what the answer itself starts with, where that is not just the closing
    inner: tuple[str, ...] = ()  # other markers

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opening, self.closing, self.answer, *self.inner)
