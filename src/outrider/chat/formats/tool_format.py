"""Owns the description of a tool format: how a model writes calls into its answer. Leaf modules fill it in.

A call is a region of the text:

    text | before | opening  body  closing | after | text
         <tool_call>  <function=f>…</function>  </tool_call>

`before` and `after` are markers only next to a region; elsewhere they are plain text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar

ToolsByName = Mapping[str, Tool]
BY_NAME_ONLY = re.compile("(?!)")  # the template pattern of a format that --tool-call-parser alone chooses


@dataclass(frozen=True)
class ParsedCall:
    name: str
    arguments: str  # JSON text of an object
    id: str | None = None  # only if the model wrote an id


@dataclass(frozen=True)
class Region:
    """The markers of a region. Without `closing`, a region ends with the JSON value behind `value_start`."""

    opening: tuple[str, ...]
    closing: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()  # other markers inside the body
    is_open: Callable[[str], bool] = lambda body: False  # True: a closing behind this body is part of a value
    value_start: re.Pattern[str] | None = None  # matches the body up to its JSON value
    is_python: bool = False  # the value may have strings in single quotes, as Python has them
    opens_answer_only: bool = False  # a region opens only at the start of the answer or right after a call
    keeps_opening: bool = False  # the opening is part of the body

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.before, *self.opening, *self.inner, *self.closing, *self.after)


@dataclass(frozen=True)
class ToolFormat:
    """The syntax of the calls of some models.

    `parse` reads a region's body and raises ValueError if the body is not a call. `call_grammar` describes a
    call for grammars; None if no grammar can be written for this format. `header` matches a body up to its
    arguments, with a group `name`, if the arguments are JSON text: then the arguments of a call under a
    grammar are passed on while they arrive.
    """

    name: str
    template_pattern: re.Pattern[str]  # found in the chat templates that use this format
    region: Region
    parse: Callable[[str, ToolsByName], list[ParsedCall]]
    call_grammar: Callable[[Tool], CallGrammar] | None = None
    tags: tuple[str, str] = ("", "")  # text that a grammar writes before and after each call
    around: tuple[str | CallGrammar, str] = ("", "")  # what a grammar writes before and after all calls
    between: str = "\n"  # text that a grammar writes between two calls
    is_single: bool = False  # an answer has at most one call
    header: re.Pattern[str] | None = None
    # Of a call that is not forced, if it differs: the texts with which it starts, and the rest.
    free_starts: tuple[str, ...] = ()
    free_grammar: Callable[[Tool], CallGrammar] | None = None
    # Of formats whose markers differ between checkpoints: the format with the markers of these added tokens.
    for_tokens: Callable[[Collection[str]], ToolFormat] | None = None
    stops: tuple[str, ...] = ()  # tokens that end the answer, besides the model's EOS tokens
    instructions: str | None = None  # how to call, for models whose template does not mention tools
