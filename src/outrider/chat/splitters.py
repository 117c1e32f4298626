"""Owns the segments that an answer's text is split into, and the split between reasoning and answer.

Text arrives in chunks. The segments never depend on where the text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from outrider.chat.formats.reasoning_format import ReasoningFormat
from outrider.chat.formats.tool_format import ParsedCall


@dataclass(frozen=True)
class TextSegment:
    text: str


@dataclass(frozen=True)
class ReasoningSegment:
    text: str


@dataclass(frozen=True)
class CallsSegment:
    """Complete calls, and the text that they were parsed from."""

    calls: tuple[ParsedCall, ...]
    text: str


@dataclass(frozen=True)
class CallOpened:
    """A call whose arguments are passed on while they arrive: a grammar guarantees their form."""

    name: str


@dataclass(frozen=True)
class CallFragment:
    """More of the arguments of the open call."""

    text: str


@dataclass(frozen=True)
class CallClosed:
    pass


Segment = TextSegment | ReasoningSegment | CallsSegment | CallOpened | CallFragment | CallClosed


class Splitter(Protocol):
    """Turns text, as it arrives, into segments."""

    def push(self, text: str) -> Iterable[Segment]: ...

    def finish(self) -> Iterable[Segment]:
        """The segments of the text that was held back: the answer is over."""
        ...


class ReasoningSplitter:
    """Splits reasoning from the answer, and passes the answer's text on to the next splitter.

    Reasoning is looked for at the start of an answer only: later its markers are plain text. It ends with its
    closing, or before a marker in `interrupting`.
    """

    def __init__(
        self,
        format: ReasoningFormat,
        answer: Splitter,
        starts_inside: bool,
        interrupting: Iterable[str] = (),
    ) -> None:
        self._format = format
        self._answer = answer
        self._closing = MarkerSearch([format.closing, *interrupting])
        self._held = ""
        self._is_inside = starts_inside
        self._is_past = False  # the reasoning has ended, or there was none

    def push(self, text: str) -> Iterator[Segment]:
        if self._is_past:
            yield from self._answer.push(text)
            return
        self._held += text
        if not self._is_inside:
            start, opening = self._held.lstrip(), self._format.opening
            if start.startswith(opening):
                self._is_inside = True
                self._held = start[len(opening) :]
            elif not opening.startswith(start):
                yield from self._pass_on(self._held)
        if self._is_inside:
            found = self._closing.find(self._held)
            num_reasoning = found.start if found else self._closing.num_safe(self._held)
            if num_reasoning:
                yield ReasoningSegment(self._held[:num_reasoning])
            if found is None:
                self._held = self._held[num_reasoning:]
            else:
                self._is_inside = False
                is_closing = found.marker == self._format.closing
                yield from self._pass_on(self._held[found.end if is_closing else found.start :])

    def finish(self) -> Iterator[Segment]:
        held, self._held = self._held, ""
        if held:
            yield from [ReasoningSegment(held)] if self._is_inside else self._answer.push(held)
        yield from self._answer.finish()

    def _pass_on(self, text: str) -> Iterator[Segment]:
        self._is_past = True
        self._held = ""
        yield from self._answer.push(text)


class StateSplitter:
    """A splitter with states. A state consumes the part of the held text that is certain."""

    def __init__(self, first: Callable[[], Iterator[Segment]]) -> None:
        self._state = first
        self._held = ""
        self._is_final = False  # no text follows

    def push(self, text: str) -> Iterator[Segment]:
        self._held += text
        yield from self._run()

    def finish(self) -> Iterator[Segment]:
        self._is_final = True
        yield from self._run()

    def _run(self) -> Iterator[Segment]:
        """Run states until one of them waits for more text."""
        while True:
            before = (self._state, len(self._held))
            yield from self._state()
            if (self._state, len(self._held)) == before:
                return

    def _num_safe(self, search: MarkerSearch) -> int:
        return len(self._held) if self._is_final else search.num_safe(self._held)


@dataclass(frozen=True)
class FoundMarker:
    start: int
    marker: str

    @property
    def end(self) -> int:
        return self.start + len(self.marker)


class MarkerSearch:
    """Finds the first of some fixed markers in text that is still growing.

    Of two markers that start at the same place, the longer one is found.
    """

    def __init__(self, markers: Iterable[str]) -> None:
        ordered = sorted({marker for marker in markers if marker}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        self._prefixes = frozenset(marker[:i] for marker in ordered for i in range(1, len(marker)))
        self._longest = len(ordered[0]) if ordered else 0

    def find(self, text: str, is_final: bool = False) -> FoundMarker | None:
        """The first marker, once it is certain. None: no marker is certain yet; see `num_safe`."""
        match = self._pattern.search(text)
        if match is None:
            return None
        if not is_final and self.num_safe(text) <= match.start():
            return None  # more text may complete a longer marker, or one that starts earlier
        return FoundMarker(match.start(), match.group())

    def num_safe(self, text: str) -> int:
        """The number of leading characters that cannot belong to a marker that is still incomplete."""
        for start in range(max(0, len(text) - self._longest), len(text)):
            if text[start:] in self._prefixes:
                return start
        return len(text)
