"""Owns the border between thinking and answer. What follows the thinking goes on to the next splitter.

Thinking is looked for at the start of an answer only: later on its markers are text like any other.
"""

from __future__ import annotations

from collections.abc import Iterator

from outrider.chat.formats.reasoning_format import ReasoningFormat
from outrider.chat.markers import MarkerSearch
from outrider.chat.pieces import Piece, Splitter, Thought


def starts_inside(format: ReasoningFormat | None, prompt: str) -> bool:
    """Whether a prompt leaves the model in the middle of its thinking."""
    return format is not None and prompt.rstrip().endswith(format.opening)


def ends_outside(format: ReasoningFormat | None, prompt: str) -> bool:
    """Whether a prompt has ended the model's thinking for it."""
    return format is not None and prompt.rstrip().endswith(format.closing)


class ReasoningSplitter:
    def __init__(self, format: ReasoningFormat, answer: Splitter, is_inside: bool) -> None:
        self._format = format
        self._answer = answer
        self._closing = MarkerSearch([format.closing])
        self._held = ""
        self._is_inside = is_inside
        self._is_past = False

    def push(self, text: str) -> Iterator[Piece]:
        if self._is_past:
            yield from self._answer.push(text)
            return
        self._held += text
        if not self._is_inside:
            yield from self._look_for_opening()
        if self._is_inside:
            yield from self._look_for_closing()

    def finish(self) -> Iterator[Piece]:
        held, self._held = self._held, ""
        if held:
            yield from [Thought(held)] if self._is_inside else self._answer.push(held)
        yield from self._answer.finish()

    def _look_for_opening(self) -> Iterator[Piece]:
        start = self._held.lstrip()
        opening = self._format.opening
        if start.startswith(opening):
            self._is_inside = True
            self._held = start[len(opening) :]
        elif not opening.startswith(start):
            yield from self._pass_on(self._held)

    def _look_for_closing(self) -> Iterator[Piece]:
        found = self._closing.find(self._held)
        num_thought = found.start if found else self._closing.num_safe(self._held)
        if num_thought:
            yield Thought(self._held[:num_thought])
        if found is None:
            self._held = self._held[num_thought:]
        else:
            self._is_inside = False
            yield from self._pass_on(self._held[found.end :])

    def _pass_on(self, text: str) -> Iterator[Piece]:
        self._is_past = True
        self._held = ""
        yield from self._answer.push(text)
