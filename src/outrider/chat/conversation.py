"""The canonical form of a chat request. Every API translates into this; nothing behind it knows which one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from outrider.media.image_reader import ReadPicture
from outrider.request import Grammar, SamplingParams

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class TextPart:
    text: str


@dataclass(frozen=True)
class MediaPart:
    """A picture, video or sound as the client named it."""

    kind: Literal["image", "video", "audio"]
    source: str  # a data: URL, an http(s) URL or a file: URL


@dataclass(frozen=True, eq=False)
class PicturePart:
    """What a MediaPart becomes once it is loaded: a picture, or the frames of a video."""

    pictures: tuple[ReadPicture, ...]


Part = TextPart | MediaPart | PicturePart


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
    reasoning: str | None = None  # an assistant's thinking, kept apart from its answer
    tool_calls: tuple[ToolCall, ...] = ()  # assistant only
    tool_call_id: str | None = None  # tool only: which call this answers
    name: str | None = None

    @property
    def text(self) -> str:
        """Its text parts, a line each."""
        return "\n".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def pictures(self) -> tuple[PicturePart, ...]:
        return tuple(part for part in self.content if isinstance(part, PicturePart))


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)  # JSON schema
    strict: bool = False


@dataclass(frozen=True)
class NamedTool:
    """tool_choice: this one must be called."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(frozen=True)
class ChatRequest:
    """One conversation to be continued."""

    messages: Sequence[Message]
    params: SamplingParams
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    grammar: Grammar | None = None  # what the answer (not its reasoning) must look like
    prediction: str | None = None  # text that the answer is expected to resemble: becomes drafts
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # e.g. {"enable_thinking": False}
