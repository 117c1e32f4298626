"""Sources of images: a data URL, a file in the allowed folder, or a web URL.

`parse_source` finds the kind of a source. `read_inline` returns the bytes of a source that needs no network;
it must run on a worker thread, since base64 of many megabytes takes long.
"""

from __future__ import annotations

import base64
import binascii
import logging
import os
import stat
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, unquote_to_bytes, urlsplit

from outrider.media.limits import InvalidMedia, MediaLimits

log = logging.getLogger(__name__)

MAX_URL_LENGTH = 8192  # characters of a file: or web URL; chosen by hand


@dataclass(frozen=True)
class DataUrl:
    media_type: str  # as the client declared it; "" if not declared
    is_base64: bool
    payload: str


@dataclass(frozen=True)
class FileUrl:
    path: str


@dataclass(frozen=True)
class WebUrl:
    url: str


Source = DataUrl | FileUrl | WebUrl


def parse_source(text: str) -> Source:
    scheme = text[:8].partition(":")[0].lower()
    if scheme == "data":
        return _data_url(text)
    if len(text) > MAX_URL_LENGTH:
        raise InvalidMedia(f"an image's URL has {len(text)} characters; the limit is {MAX_URL_LENGTH}")
    if scheme in ("http", "https"):
        return WebUrl(text)
    if scheme == "file":
        return FileUrl(_file_path(text))
    raise InvalidMedia(f"an image must be a data:, http: or https: URL, but begins with {text[:16]!r}")


def read_inline(source: DataUrl | FileUrl, limits: MediaLimits) -> bytes:
    if isinstance(source, DataUrl):
        return _read_data(source, limits.max_image_bytes)
    return _read_file(source.path, limits)


def check_size(num_bytes: int, limits: MediaLimits) -> None:
    if num_bytes > limits.max_image_bytes:
        raise InvalidMedia(
            f"an image has {num_bytes:,} bytes or more; the limit is {limits.max_image_bytes:,}"
        )


def _data_url(text: str) -> DataUrl:
    head, comma, payload = text.partition(",")
    if not comma:
        raise InvalidMedia("a data: URL without a comma contains no data")
    media_type, *settings = head[len("data:") :].split(";")
    return DataUrl(media_type.strip().lower(), "base64" in (s.strip().lower() for s in settings), payload)


def _read_data(source: DataUrl, max_bytes: int) -> bytes:
    # Base64 has four characters for three bytes. A payload that is too long is not decoded.
    if len(source.payload) > (max_bytes + 3) * 4:
        raise InvalidMedia(f"an image has more than {max_bytes:,} bytes")
    if not source.is_base64:
        data = unquote_to_bytes(source.payload)
    else:
        text = unquote(source.payload) if "%" in source.payload else source.payload
        text = "".join(text.split())
        try:
            data = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
        except (binascii.Error, ValueError):
            raise InvalidMedia("an image's base64 cannot be decoded") from None
    if not data:
        raise InvalidMedia("an image has no bytes")
    if len(data) > max_bytes:
        raise InvalidMedia(f"an image has {len(data):,} bytes; the limit is {max_bytes:,}")
    return data


def _file_path(text: str) -> str:
    try:
        parts: SplitResult = urlsplit(text)
    except ValueError:
        raise InvalidMedia("a file: URL cannot be parsed") from None
    if parts.netloc not in ("", "localhost"):
        raise InvalidMedia("a file: URL must not name a host")
    path = unquote(parts.path)
    if "\0" in path:
        raise InvalidMedia("a file: URL must not contain a zero byte")
    return path


def _read_file(path: str, limits: MediaLimits) -> bytes:
    """Read a file inside the operator's folder, after following links. Outside, existence is not revealed."""
    if limits.local_folder is None:
        raise InvalidMedia(
            "file: URLs are not allowed (the server's option --allow-local-media allows a folder)"
        )
    folder = os.path.realpath(limits.local_folder)
    real = os.path.realpath(path)
    if os.path.commonpath([folder, real]) != folder:
        raise InvalidMedia("a file: URL leads out of the folder that media may be read from")
    try:
        # Without O_NONBLOCK, opening a pipe would block the thread for ever.
        with os.fdopen(os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise InvalidMedia("a file: URL must name a plain file")
            check_size(state.st_size, limits)
            data = file.read(limits.max_image_bytes + 1)
    except OSError as error:
        log.info("a local image cannot be read: %r", error)
        raise InvalidMedia("a local image cannot be read") from None
    check_size(len(data), limits)
    return data
