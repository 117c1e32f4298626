"""What a tool format is: how a model writes calls into its answer, as data that leaf modules fill in.

A call stands in a region of the text:

    text | before | opening  body  closing | after | text
         <tool_call>  <function=f>…</function>  </tool_call>

`before` and `after` count only next to a region; elsewhere they are text like any other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outrider.chat.conversation import Tool
from outrider.chat.formats.shape import Shape

Toolbox = Mapping[str, Tool]


@dataclass(frozen=True)
class ParsedCall:
    name: str
    arguments: str  # JSON text of an object
    id: str | None = None  # where the model itself gave one


@dataclass(frozen=True)
class Region:
    """Where calls stand. Without a closing, a region ends with the JSON value that follows `value_start`."""

    opening: tuple[str, ...]
    closing: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()  # other markers that the body is made of
    is_open: Callable[[str], bool] = lambda body: False  # a closing right after this body is part of a value
    value_start: re.Pattern[str] | None = None  # of the body, up to its JSON value
    opens_answer_only: bool = False  # it opens only where the answer, or the text after a call, starts
    keeps_opening: bool = False  # the opening is the first part of the body

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.before, *self.opening, *self.inner, *self.closing, *self.after)


@dataclass(frozen=True)
class ToolFormat:
    """One way of writing calls.

    `parse` reads a region's body and raises ValueError where it is no call. `shape` says how a call is
    written, for grammars that force one; None where that cannot be said. `header` matches a body up to its
    arguments, with a group `name`, where the arguments are JSON text: then a call that a grammar forced is
    passed on while it grows.
    """

    name: str
    sign: re.Pattern[str]  # a chat template that speaks this format
    region: Region
    parse: Callable[[str, Toolbox], list[ParsedCall]]
    shape: Callable[[Tool], Shape] | None = None
    around: tuple[str, str] = ("", "")  # what a grammar writes around all calls
    between: str = "\n"  # and between two
    is_single: bool = False  # an answer holds one call at most
    header: re.Pattern[str] | None = None
    stops: tuple[str, ...] = ()  # tokens that end the answer, beside the model's own
    instructions: str | None = None  # how to tell a model whose template says nothing of tools
