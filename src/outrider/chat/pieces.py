"""What an answer's text is split into, before names, indices and layout are seen to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from outrider.chat.formats.tool_format import ParsedCall


@dataclass(frozen=True)
class Said:
    text: str


@dataclass(frozen=True)
class Thought:
    text: str


@dataclass(frozen=True)
class Called:
    """Calls that were read whole, and the text that they stood in."""

    calls: tuple[ParsedCall, ...]
    text: str


@dataclass(frozen=True)
class CallOpened:
    """A call whose arguments are passed on while they grow: a grammar sees to their form."""

    name: str


@dataclass(frozen=True)
class CallGrew:
    fragment: str


@dataclass(frozen=True)
class CallClosed:
    pass


Piece = Said | Thought | Called | CallOpened | CallGrew | CallClosed


class Splitter(Protocol):
    """Turns text as it arrives into pieces that mean something; how the text was cut does not matter."""

    def push(self, text: str) -> Iterable[Piece]: ...

    def finish(self) -> Iterable[Piece]:
        """What was held back: the answer is over."""
        ...


class PlainSplitter:
    """Where nothing is looked for."""

    def push(self, text: str) -> Iterable[Piece]:
        return [Said(text)] if text else []

    def finish(self) -> Iterable[Piece]:
        return []
