"""Owns the conversion of OpenAI-style message and tool dicts, as Python callers write them.

Images may be arrays, Pillow images, bytes, files or data: URLs; videos may be arrays of frames, bytes, files
or data: URLs. The caller may name any file, unlike a client of the server. Nothing is fetched from the
network. Encoded images and videos are decoded in a child process, as those of the server's clients are: the
caller may have them from elsewhere.
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
from outrider.media.frames import DecodedVideo, VideoHeader
from outrider.media.image_reader import ImageReader, ProcessedImage, VideoReader
from outrider.media.images import DecodedImage, image_from_pixels
from outrider.media.limits import InvalidMedia, MediaLimits
from outrider.media.sources import DataUrl, parse_source, read_inline
from outrider.media.video import FPS_RANGE, is_fps, resized, spread
from outrider.request import InvalidRequest

LIMITS = MediaLimits()
IMAGE_TYPES = ("image", "image_url", "input_image")
VIDEO_TYPES = ("video", "video_url", "input_video")
AUDIO_TYPES = ("audio", "audio_url", "input_audio")


@dataclass(frozen=True)
class ImageInput:
    """How images become parts of messages. The decoder's process starts with the first encoded image."""

    reader: ImageReader
    videos: VideoReader | None = None  # None: a video is read as separate images
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
    if kind in AUDIO_TYPES:
        return MediaPart("audio", "")  # the renderer refuses it, with the reason
    if kind not in (*IMAGE_TYPES, *VIDEO_TYPES):
        raise InvalidRequest(f"content parts are text, images or videos, not {kind!r}")
    if images is None:
        return MediaPart("image" if kind in IMAGE_TYPES else "video", "")  # the renderer refuses it
    if kind in IMAGE_TYPES:
        return ImagePart((images.reader.read(_image(_given(part, "image"), images.decoder)),))
    return ImagePart(_video(_given(part, "video"), part.get("fps"), images))


def _given(part: Mapping[str, Any], kind: str) -> Any:
    given = part.get(kind, part.get(f"{kind}_url"))
    return given.get("url") if isinstance(given, Mapping) else given


def _image(given: Any, decoder: MediaDecoder) -> DecodedImage:
    if isinstance(given, np.ndarray):
        return image_from_pixels(given)
    if hasattr(given, "convert"):  # a Pillow image
        return image_from_pixels(np.asarray(given.convert("RGB")))
    return decoder.decode_image(*_bytes(given, "image"))


def _video(given: Any, fps: float | None, images: ImageInput) -> tuple[ProcessedImage, ...]:
    """A video, or its frames as images."""
    if isinstance(given, np.ndarray):
        return _frames(given, fps, images)
    data, declared = _bytes(given, "video")
    if images.videos is None:
        return tuple(images.reader.read(frame) for frame in images.decoder.decode_frames(data, declared))
    header = images.decoder.read_header(data, declared)
    sample = images.videos.sample(header, LIMITS.max_video_frames)
    return (images.videos.read(images.decoder.decode_video(data, declared, header, sample)),)


def _frames(frames: np.ndarray, fps: float | None, images: ImageInput) -> tuple[ProcessedImage, ...]:
    if frames.ndim != 4 or frames.shape[3] != 3 or frames.dtype != np.uint8 or 0 in frames.shape:
        raise InvalidMedia("a video must be an array of uint8 [frames, height, width, 3]")
    if images.videos is None:
        numbers = spread(len(frames), LIMITS.max_frames)
        return tuple(images.reader.read(image_from_pixels(frames[number])) for number in numbers)
    fps = images.videos.fps if fps is None else fps
    if not isinstance(fps, (int, float)) or not is_fps(fps):
        raise InvalidMedia("a video's fps must be between {:g} and {:g}, not {}".format(*FPS_RANGE, fps))
    header = VideoHeader(len(frames), fps, frames.shape[2], frames.shape[1])
    sample = images.videos.sample(header, LIMITS.max_video_frames)
    sized = np.stack([resized(frames[number], sample) for number in sample.numbers])
    return (images.videos.read(DecodedVideo(header, sample.numbers, sized)),)


def _bytes(given: Any, kind: str) -> tuple[bytes, str]:
    """The bytes of an encoded image or video, and the media type that a data: URL declares."""
    if isinstance(given, bytes):
        return given, ""
    if isinstance(given, Path) or (isinstance(given, str) and ":" not in given[:8]):
        try:
            return Path(given).read_bytes(), ""
        except OSError as error:
            raise InvalidMedia(f"{given} cannot be read: {error.strerror}") from None
    if isinstance(given, str):
        source = parse_source(given)
        if isinstance(source, DataUrl):
            return read_inline(source, LIMITS), source.media_type
        raise InvalidMedia(
            f"the Python API fetches nothing: give bytes, file, array or data: URL of the {kind}"
        )
    raise InvalidMedia(
        f"the {kind} must be an array, bytes, a file or a data: URL, not {type(given).__name__}"
    )
