"""Owns the conversion of OpenAI-style message and tool dicts, as Python callers write them.

Images may be arrays, Pillow images, bytes, files or data: URLs. The caller may name any file, unlike a client
of the server. Nothing is fetched from the network. Encoded images are decoded in a child process, as those of
the server's clients are: the caller may have them from elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from outrider.chat.conversation import (
    ImagePart,
    MediaPart,
    Message,
    NamedTool,
    Part,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)
from outrider.chat.json_text import dumps
from outrider.chat.messages import role_named
from outrider.media.decoder import MediaDecoder
from outrider.media.image_reader import ImageReader
from outrider.media.images import DecodedImage, image_from_pixels
from outrider.media.limits import InvalidMedia, MediaLimits
from outrider.media.sources import DataUrl, parse_source, read_inline
from outrider.request import InvalidRequest

LIMITS = MediaLimits()
IMAGE_TYPES = ("image", "image_url", "input_image")


@dataclass(frozen=True)
class ImageInput:
    """How images become parts of messages. The decoder's process starts with the first encoded image."""

    reader: ImageReader
    decoder: MediaDecoder = field(default_factory=lambda: MediaDecoder(LIMITS, num_processes=1))


def messages_from_dicts(
    messages: Iterable[Mapping[str, Any]], images: ImageInput | None = None
) -> list[Message]:
    """Canonical messages. `images`: None for a model that reads text only."""
    converted = []
    for i, message in enumerate(messages):
        try:
            converted.append(_message(message, images))
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidRequest(f"messages[{i}] is not a chat message: {error!r}") from error
    return converted


def tools_from_dicts(tools: Iterable[Mapping[str, Any]]) -> list[Tool]:
    converted = []
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
            raise InvalidRequest(f"tools[{i}] is not a function: only functions are supported")
        if not isinstance(function.get("name"), str):
            raise InvalidRequest(f"tools[{i}].function has no name")
        converted.append(
            Tool(
                function["name"],
                function.get("description") or "",
                function.get("parameters") or {},
                strict=None if function.get("strict") is None else bool(function["strict"]),
            )
        )
    return converted


def tool_choice_from(choice: str | Mapping[str, Any]) -> ToolChoice:
    """From "auto", "none", "required" or {"type": "function", "function": {"name": ...}}."""
    if choice == "auto" or choice == "none" or choice == "required":
        return choice  # type: ignore[return-value]
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f'tool_choice is "auto", "none", "required" or a function, not {choice!r}')
    return NamedTool(function["name"])


def _message(message: Mapping[str, Any], images: ImageInput | None) -> Message:
    role = role_named(message["role"])
    content = _content(message.get("content"), images)
    name = message.get("name")
    if role == "tool":
        return Message(role, content, tool_call_id=message.get("tool_call_id"), name=name)
    if role != "assistant":
        return Message(role, content, name=name)
    if message.get("refusal") and not content:
        content = (TextPart(message["refusal"]),)
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    calls = tuple(_tool_call(call) for call in message.get("tool_calls") or ())
    return Message(role, content, reasoning=reasoning, tool_calls=calls, name=name)


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    function = call["function"]
    arguments = function.get("arguments") or ""
    text = arguments if isinstance(arguments, str) else dumps(dict(arguments))
    return ToolCall(str(call.get("id", "")), function["name"], text)


def _content(content: Any, images: ImageInput | None) -> tuple[Part, ...]:
    if content is None or isinstance(content, str):
        return (TextPart(content),) if content else ()
    if not isinstance(content, Sequence):
        raise TypeError(f"the content is a string or a list of parts, not {type(content).__name__}")
    return tuple(_part(part, images) for part in content)


def _part(part: Mapping[str, Any], images: ImageInput | None) -> Part:
    kind = part.get("type")
    if kind in ("text", "refusal"):
        return TextPart(part[kind])
    if kind not in IMAGE_TYPES:
        raise InvalidRequest(f"content parts are text or images, not {kind!r}")
    if images is None:
        return MediaPart("image", "")  # the renderer refuses it, with the reason
    return ImagePart((images.reader.read(_image(part, images.decoder)),))


def _image(part: Mapping[str, Any], decoder: MediaDecoder) -> DecodedImage:
    given = part.get("image", part.get("image_url"))
    if isinstance(given, Mapping):
        given = given.get("url")
    if isinstance(given, np.ndarray):
        return image_from_pixels(given)
    if isinstance(given, bytes):
        return decoder.decode_image(given, "")
    if isinstance(given, Path) or (isinstance(given, str) and ":" not in given[:8]):
        try:
            data = Path(given).read_bytes()
        except OSError as error:
            raise InvalidMedia(f"{given} cannot be read: {error.strerror}") from None
        return decoder.decode_image(data, "")
    if isinstance(given, str):
        source = parse_source(given)
        if isinstance(source, DataUrl):
            return decoder.decode_image(read_inline(source, LIMITS), source.media_type)
        raise InvalidMedia("the Python API fetches nothing: give an image's bytes, file, array or data: URL")
    if hasattr(given, "convert"):  # a Pillow image
        return image_from_pixels(np.asarray(given.convert("RGB")))
    raise InvalidMedia(f"an image is an array, bytes, a file or a data: URL, not {type(given).__name__}")
