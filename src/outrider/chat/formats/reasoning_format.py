"""Owns the description of a reasoning format: the markers around the reasoning. Leaf modules fill it in."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

MessageKind = Literal["reasoning", "text", "calls"]


@dataclass(frozen=True)
class Framing:
    """An answer that is a list of messages. A header tells the kind of its message.

    start  header  content marker  content  end         <|start|> assistant to=user <|message|> Hello. <|eom|>
    """

    starts: tuple[str, ...]
    contents: tuple[str, ...]
    ends: tuple[str, ...]
    kind: Callable[[str], MessageKind]  # of a header, with the content marker behind it
    next_message: str  # what stands between the end of a message and the part of a header that tells its kind
    recipient: str  # the start of that part, the same for all kinds
    reasoning_name: str  # the rest of that part, for reasoning


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
    framing: Framing | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        framed = self.framing
        frame = (*framed.starts, *framed.contents, *framed.ends) if framed is not None else ()
        return (self.opening, self.closing, self.answer, *self.inner, *self.layout, *frame)
