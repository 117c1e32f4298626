"""Owns the canonical form of a chat request. Every API translates its requests into this form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from outrider.answer_form import Grammar
from outrider.media.image_reader import ProcessedImage
from outrider.request import SamplingParams

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class TextPart:
    text: str


@dataclass(frozen=True)
class MediaPart:
    """An image, a video or a sound that is not loaded yet."""

    kind: Literal["image", "video", "audio"]
    source: str  # a data: URL, an http(s) URL or a file: URL


@dataclass(frozen=True, eq=False)
class ImagePart:
    """A loaded MediaPart: one image, one video, or the frames of a video that is read as images."""

    images: tuple[ProcessedImage, ...]


Part = TextPart | MediaPart | ImagePart  # a content part


@dataclass(frozen=True)
class ToolCall:
    """A call that the model made."""

    id: str
    name: str
    arguments: str  # JSON text


@dataclass(frozen=True)
class Message:
    role: Role
    content: tuple[Part, ...] = ()
    reasoning: str | None = None  # assistant only: the reasoning, separate from the answer
    tool_calls: tuple[ToolCall, ...] = ()  # assistant only
    tool_call_id: str | None = None  # tool only: the call that this message answers
    name: str | None = None

    @property
    def text(self) -> str:
        """The text parts, joined by newlines."""
        return "\n".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def image_parts(self) -> tuple[ImagePart, ...]:
        return tuple(part for part in self.content if isinstance(part, ImagePart))


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)  # JSON schema
    # True: a call whose arguments break the schema is not given out as a call, and a schema that a grammar
    # cannot enforce is refused. False: with tool_choice "auto", the arguments may be any object.
    strict: bool | None = None
    is_deferred: bool = False  # not in the list of tools that the prompt shows: a tool's result describes it


@dataclass(frozen=True)
class NamedTool:
    """A tool_choice: the model must call this tool."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(frozen=True)
class ChatRequest:
    """A conversation that the model continues."""

    messages: Sequence[Message]
    params: SamplingParams
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    grammar: Grammar | None = None  # for the answer, not for its reasoning
    prediction: str | None = None  # text that the answer is expected to resemble; used as drafts
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # e.g. {"enable_thinking": False}

    @property
    def is_constrained(self) -> bool:
        """True if the answer has to follow a grammar: the client's own, or that of a forced call."""
        has_grammar = self.grammar is not None or self.params.grammar is not None
        return has_grammar or self.tool_choice not in ("auto", "none")

    @property
    def active_tools(self) -> dict[str, Tool]:
        """The tools that the model may call, by name."""
        return {} if self.tool_choice == "none" else {tool.name: tool for tool in self.tools}
