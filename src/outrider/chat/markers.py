"""Owns the search for fixed markers in text that arrives in pieces.

Must not know what a marker means. What is found never depends on how the text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Found:
    start: int
    marker: str

    @property
    def end(self) -> int:
        return self.start + len(self.marker)


class MarkerSearch:
    """Finds the first of some markers; of two that start at the same place, the longer one."""

    def __init__(self, markers: Iterable[str]) -> None:
        ordered = sorted({marker for marker in markers if marker}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        self._prefixes = frozenset(marker[:i] for marker in ordered for i in range(1, len(marker)))
        self._longest = len(ordered[0]) if ordered else 0

    def find(self, text: str, is_final: bool = False) -> Found | None:
        """The first marker, once it is certain. None: there is none yet; see `num_safe`."""
        match = self._pattern.search(text)
        if match is None:
            return None
        if not is_final and self.num_safe(text) <= match.start():
            return None  # a longer one, or one that starts earlier, may still come of it
        return Found(match.start(), match.group())

    def num_safe(self, text: str) -> int:
        """How much of a text cannot belong to a marker that is still to be completed."""
        for start in range(max(0, len(text) - self._longest), len(text)):
            if text[start:] in self._prefixes:
                return start
        return len(text)


class Silencer:
    """Passes text on without the given markers: special tokens that nobody should see."""

    def __init__(self, silenced: Iterable[str]) -> None:
        self._search = MarkerSearch(silenced)
        self._held = ""

    def push(self, text: str, is_final: bool = False) -> str:
        self._held += text
        passed = []
        while found := self._search.find(self._held, is_final):
            passed.append(self._held[: found.start])
            self._held = self._held[found.end :]
        num_safe = len(self._held) if is_final else self._search.num_safe(self._held)
        passed.append(self._held[:num_safe])
        self._held = self._held[num_safe:]
        return "".join(passed)
