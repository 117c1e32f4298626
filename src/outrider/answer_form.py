"""The form of an answer: its grammar, and where its reasoning begins and ends. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Marker = tuple[str | int, ...]  # a text in which added tokens stand as their ids


@dataclass(frozen=True)
class Triggers:
    """Where a lazy grammar starts. It includes the marker that triggers it.

    In reasoning, markers count only with `in_reasoning`: models mention them there.
    """

    markers: tuple[Marker, ...]
    at_start: bool = False  # a marker counts only at the start of the answer or right after a call
    reasoning: tuple[Marker, Marker] | None = None  # its opening, which may start the answer, and its closing
    starts_inside: bool = False  # the prompt has opened the reasoning
    in_reasoning: bool = False


@dataclass(frozen=True)
class Grammar:
    """The form of an answer: a JSON schema, any JSON object, a regular expression or a Lark grammar."""

    kind: Literal["json_schema", "json_object", "regex", "lark"]
    text: str = ""  # the schema as JSON text, the expression or the grammar
    after_ids: tuple[int, ...] = ()  # the grammar starts after these tokens, for example the end of reasoning
    triggers: Triggers | None = None  # a lazy grammar: each of its texts may follow any free text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids that it names, outside its text."""
        markers: tuple[Marker, ...] = ()
        if self.triggers is not None:
            markers = (*self.triggers.markers, *(self.triggers.reasoning or ()))
        return (*self.after_ids, *(part for marker in markers for part in marker if isinstance(part, int)))


@dataclass(frozen=True)
class ReasoningMarks:
    """Where the reasoning of an answer begins and ends, and the tokens that end it at the thinking budget."""

    opening: str
    closings: tuple[str, ...]  # any of these ends the reasoning
    close_ids: tuple[int, ...]  # forced at the budget, once
    banned_ids: tuple[int, ...] = ()  # not sampled right after close_ids: they would open the reasoning again
    starts_inside: bool = False  # the prompt has opened the reasoning
    may_repeat: bool = False  # reasoning may begin at any place and several times; False: at the start only
    splits_closing: bool = False  # the closing is several tokens: none of them is cut off by the budget
