"""A small HTTP/1.1 client for streams: one connection a request, every read stamped as it comes in.

Bare asyncio, so that sixteen streams cost the machine next to nothing beside the model. Owns the wire; knows
nothing of chats.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import TypeVar

from outrider.server_address import ServerAddress

CONNECT_S = 10.0
READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20
DEFAULT_PORTS = {"http": 80, "https": 443}

T = TypeVar("T")


class HttpFailed(Exception):
    """No answer, or only a part of one; the message says why."""


class Unreachable(HttpFailed):
    """Nobody listens there."""


@dataclass(frozen=True)
class Read:
    """Bytes of a body, and when they came."""

    data: bytes
    at_s: float


class HttpResponse:
    def __init__(
        self, status: int, headers: dict[str, str], reader: asyncio.StreamReader, silence_s: float
    ) -> None:
        self.status = status
        self.headers = headers  # names in small letters
        self._reader = reader
        self._silence_s = silence_s

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    async def reads(self) -> AsyncIterator[Read]:
        """The body as it comes; HttpFailed if it breaks off."""
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            parts = self._chunks()
        else:
            parts = self._plain(self.headers.get("content-length"))
        async for data in parts:
            yield Read(data, time.perf_counter())

    async def body(self) -> bytes:
        return b"".join([read.data async for read in self.reads()])

    async def _chunks(self) -> AsyncIterator[bytes]:
        while True:
            line = await _in_time(self._reader.readuntil(b"\r\n"), self._silence_s)
            try:
                size = int(line.partition(b";")[0], 16)
            except ValueError:
                raise HttpFailed(f"the server sent a chunk without a size: {line[:40]!r}") from None
            if size == 0:
                return
            data = await _in_time(self._reader.readexactly(size + 2), self._silence_s)
            yield data[:-2]

    async def _plain(self, length: str | None) -> AsyncIterator[bytes]:
        """Up to its length, or, where none is given, to the end of the connection."""
        left = int(length) if length is not None and length.isdigit() else None
        while left is None or left > 0:
            most = READ_BYTES if left is None else min(left, READ_BYTES)
            data = await _in_time(self._reader.read(most), self._silence_s)
            if not data:
                if left is not None:
                    raise HttpFailed("the server hung up in the middle of its answer")
                return
            left = None if left is None else left - len(data)
            yield data


@contextlib.asynccontextmanager
async def request(
    address: ServerAddress, method: str, route: str, body: object = None, silence_s: float = 60.0
) -> AsyncIterator[HttpResponse]:
    """The head of an answer, whatever its status; the connection ends with the block."""
    reader, writer = await _connect(address)
    try:
        try:
            writer.write(_request_bytes(address, method, route, body))
            await writer.drain()
            yield await _response(reader, silence_s)
        except asyncio.IncompleteReadError:
            raise HttpFailed("the server hung up in the middle of its answer") from None
        except asyncio.LimitOverrunError:
            raise HttpFailed("the server sent a line without an end") from None
        except OSError as error:
            raise HttpFailed(f"the connection to {address} broke: {_reason(error)}") from None
    finally:
        writer.close()


async def _connect(address: ServerAddress) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    tls = ssl.create_default_context() if address.scheme == "https" else None
    port = address.port or DEFAULT_PORTS[address.scheme]
    opening = asyncio.open_connection(address.host, port, ssl=tls, limit=MAX_LINE_BYTES)
    try:
        return await asyncio.wait_for(opening, CONNECT_S)
    except (OSError, UnicodeError) as error:  # TimeoutError is an OSError
        raise Unreachable(f"cannot reach {address}: {_reason(error)}") from None


def _request_bytes(address: ServerAddress, method: str, route: str, body: object) -> bytes:
    payload = b"" if body is None else json.dumps(body).encode()
    headers = address.headers("outrider-bench") | {
        "Host": address.netloc,
        "Content-Length": str(len(payload)),
        "Connection": "close",
    }
    lines = [
        f"{method} {address.path}{route} HTTP/1.1",
        *(f"{name}: {text}" for name, text in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + payload


async def _response(reader: asyncio.StreamReader, silence_s: float) -> HttpResponse:
    while True:
        head = await _in_time(reader.readuntil(b"\r\n\r\n"), silence_s)
        first, *lines = head.decode("latin-1").split("\r\n")
        parts = first.split(" ", 2)
        if not parts[0].startswith("HTTP/") or len(parts) < 2 or not parts[1].isdigit():
            raise HttpFailed(f"the server does not speak HTTP: {first[:60]!r}")
        if int(parts[1]) >= 200:  # below: "go on"
            break
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    headers = {name.strip().lower(): value.strip() for name, value in pairs}
    return HttpResponse(int(parts[1]), headers, reader, silence_s)


async def _in_time(reading: Awaitable[T], silence_s: float) -> T:
    try:
        async with asyncio.timeout(silence_s):
            return await reading
    except TimeoutError:
        raise HttpFailed(f"the server was silent for {silence_s:g} seconds") from None


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    number = error.errno if isinstance(error, OSError) else None
    if number is not None and number > 0:  # asyncio says "Connect call failed"; below 0 names were not found
        return os.strerror(number)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
