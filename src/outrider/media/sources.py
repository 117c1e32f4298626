"""Where a picture is: a data URL, a file below the allowed folder, or an address to fetch.

A client names a source as text; `parse_source` says what kind it is, `read_inline` gets the bytes of those
that need no network. Both belong on a worker thread: base64 of many megabytes takes a while.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, unquote_to_bytes, urlsplit

from outrider.media.limits import InvalidMedia, MediaLimits

MAX_URL_LENGTH = 8192


@dataclass(frozen=True)
class DataUrl:
    media_type: str  # as the client declared it; empty where it did not
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
    """What a client's word for a picture means."""
    scheme = text[:8].partition(":")[0].lower()
    if scheme == "data":
        return _data_url(text)
    if len(text) > MAX_URL_LENGTH:
        raise InvalidMedia(f"a picture's URL has {len(text)} characters; the most is {MAX_URL_LENGTH}")
    if scheme in ("http", "https"):
        return WebUrl(text)
    if scheme == "file":
        return FileUrl(_file_path(text))
    raise InvalidMedia("a picture must be a data:, http: or https: URL, and begins with " + repr(text[:16]))


def read_inline(source: DataUrl | FileUrl, limits: MediaLimits) -> bytes:
    if isinstance(source, DataUrl):
        return _read_data(source, limits.max_image_bytes)
    return _read_file(source.path, limits)


def check_size(num_bytes: int, limits: MediaLimits) -> None:
    if num_bytes > limits.max_image_bytes:
        raise InvalidMedia(
            f"a picture has {num_bytes:,} bytes or more; the most is {limits.max_image_bytes:,}"
        )


def _data_url(text: str) -> DataUrl:
    head, comma, payload = text.partition(",")
    if not comma:
        raise InvalidMedia("a data: URL without a comma holds no data")
    media_type, *settings = head[len("data:") :].split(";")
    return DataUrl(media_type.strip().lower(), "base64" in (s.strip().lower() for s in settings), payload)


def _read_data(source: DataUrl, max_bytes: int) -> bytes:
    # Four characters for three bytes: what is too long is not decoded at all.
    if len(source.payload) > (max_bytes + 3) * 4:
        raise InvalidMedia(f"a picture has more than {max_bytes:,} bytes")
    if not source.is_base64:
        data = unquote_to_bytes(source.payload)
    else:
        text = unquote(source.payload) if "%" in source.payload else source.payload
        text = "".join(text.split())
        try:
            data = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
        except (binascii.Error, ValueError):
            raise InvalidMedia("a picture's base64 cannot be decoded") from None
    if not data:
        raise InvalidMedia("a picture has no bytes")
    if len(data) > max_bytes:
        raise InvalidMedia(f"a picture has {len(data):,} bytes; the most is {max_bytes:,}")
    return data


def _file_path(text: str) -> str:
    try:
        parts: SplitResult = urlsplit(text)
    except ValueError:
        raise InvalidMedia("a file: URL cannot be read") from None
    if parts.netloc not in ("", "localhost"):
        raise InvalidMedia("a file: URL may not name a host")
    path = unquote(parts.path)
    if "\0" in path:
        raise InvalidMedia("a file: URL may not hold a zero byte")
    return path


def _read_file(path: str, limits: MediaLimits) -> bytes:
    """Only below the operator's folder, wherever links lead. What is elsewhere is not even said to exist."""
    if limits.local_folder is None:
        raise InvalidMedia("file: URLs are not allowed here (the server's --allow-local-media says where)")
    folder = os.path.realpath(limits.local_folder)
    real = os.path.realpath(path)
    if os.path.commonpath([folder, real]) != folder:
        raise InvalidMedia("a file: URL leads out of the folder that media may be read from")
    try:
        # Without O_NONBLOCK a pipe would hold the thread for ever.
        with os.fdopen(os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise InvalidMedia("a file: URL must name a plain file")
            check_size(state.st_size, limits)
            data = file.read(limits.max_image_bytes + 1)
    except OSError as error:
        raise InvalidMedia(f"a local picture cannot be read: {error.strerror or error}") from None
    check_size(len(data), limits)
    return data
