"""Pictures in conversations of the Python API: arrays, Pillow images, bytes, files or data URLs.

The caller is trusted with files, unlike a client of the server; nothing is fetched from the network here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider.media.image_reader import PictureReader
from outrider.media.images import Picture, decode_picture, picture_of
from outrider.media.limits import InvalidMedia, MediaLimits
from outrider.media.sources import DataUrl, parse_source, read_inline
from outrider.prompt_media import PromptMedia
from outrider.request import InvalidRequest

LIMITS = MediaLimits()
IMAGE_TYPES = ("image", "image_url", "input_image")


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the engine takes it."""

    ids: tuple[int, ...]
    media: PromptMedia | None = None


def take_pictures(messages: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Picture]]:
    """The conversation as templates take it, and its pictures in order."""
    plain: list[dict[str, Any]] = []
    pictures: list[Picture] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            parts = []
            for part in content:
                if part.get("type") in IMAGE_TYPES:
                    pictures.append(_picture(part))
                    part = {"type": "image"}
                elif part.get("type") != "text":
                    raise InvalidRequest(f"parts are text or images, not {part.get('type')!r}")
                parts.append(part)
            message = {**message, "content": parts}
        plain.append(dict(message))
    return plain, pictures


def encode_with_pictures(
    reader: PictureReader, tokenizer: Any, text: str, pictures: Sequence[Picture]
) -> EncodedPrompt:
    """`text`: a rendered conversation with a placeholder for each picture."""
    between = text.split(reader.placeholder)
    if len(between) != len(pictures) + 1:
        raise InvalidRequest(
            f"the chat template shows {len(between) - 1} of {len(pictures)} pictures: it takes none there, "
            f"or a message holds {reader.placeholder!r}"
        )
    read = [reader.read(picture) for picture in pictures]
    whole = between[0] + "".join(one.text + rest for one, rest in zip(read, between[1:], strict=True))
    ids = tuple(tokenizer.encode(whole, add_special_tokens=False))
    return EncodedPrompt(ids, reader.place(ids, read))


def _picture(part: Mapping[str, Any]) -> Picture:
    given = part.get("image", part.get("image_url"))
    if isinstance(given, Mapping):
        given = given.get("url")
    if isinstance(given, np.ndarray):
        return picture_of(given)
    if isinstance(given, bytes):
        return decode_picture(given, "", LIMITS)
    if isinstance(given, Path) or (isinstance(given, str) and ":" not in given[:8]):
        return decode_picture(_read(Path(given)), "", LIMITS)
    if isinstance(given, str):
        source = parse_source(given)
        if isinstance(source, DataUrl):
            return decode_picture(read_inline(source, LIMITS), source.media_type, LIMITS)
        raise InvalidMedia("nothing is fetched here: give a picture's bytes, file, array or data: URL")
    if hasattr(given, "convert"):  # Pillow's
        return picture_of(np.asarray(given.convert("RGB")))
    raise InvalidMedia(f"a picture is an array, bytes, a file or a data: URL, not {type(given).__name__}")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidMedia(f"{path} cannot be read: {error.strerror}") from None
