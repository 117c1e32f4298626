"""GET for pictures: one URL to bytes, without trust in whom it leads to.

Each hop resolves the name, refuses private addresses, connects to the address that was checked, and takes no
more bytes and no more time than it is given. No cookies, no keys, no proxies, no compression.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

import h11

from outrider.media.addresses import resolve
from outrider.media.limits import InvalidMedia, MediaLimits
from outrider.media.sources import MAX_URL_LENGTH, check_size

PORTS = {"http": 80, "https": 443}
REDIRECTS = (301, 302, 303, 307, 308)
READ_BYTES = 1 << 16
ACCEPT = "image/*,video/*;q=0.8,*/*;q=0.1"


@dataclass(frozen=True)
class Fetched:
    data: bytes
    media_type: str


@dataclass(frozen=True)
class _Target:
    scheme: str
    host: str
    port: int
    path: str  # with the query

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


async def fetch(url: str, limits: MediaLimits) -> Fetched:
    """Follows redirects, and checks each of them as if it had been asked for."""
    try:
        async with asyncio.timeout(limits.fetch_total_s):
            for _ in range(limits.max_redirects + 1):
                found = await _hop(_target(url), limits)
                if isinstance(found, Fetched):
                    return found
                url = urljoin(url, found)
    except TimeoutError:
        raise InvalidMedia(f"a picture's URL did not answer within {limits.fetch_total_s:g} s") from None
    raise InvalidMedia(f"a picture's URL was redirected more than {limits.max_redirects} times")


async def _hop(target: _Target, limits: MediaLimits) -> Fetched | str:
    """One request: the content, or where it is instead."""
    try:
        async with asyncio.timeout(limits.fetch_timeout_s), _connected(target, limits) as streams:
            return await _get(target, *streams, limits)
    except TimeoutError:
        raise InvalidMedia(f"{target.host} did not answer within {limits.fetch_timeout_s:g} s") from None
    except (OSError, ssl.SSLError) as error:
        raise InvalidMedia(f"a picture could not be fetched from {target.host}: {error}") from None
    except h11.ProtocolError as error:
        raise InvalidMedia(f"{target.host} does not speak HTTP properly: {error}") from None


def _target(url: str) -> _Target:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise InvalidMedia(f"a picture's URL cannot be read: {url[:100]!r}") from None
    if parts.scheme not in PORTS or not host or len(url) > MAX_URL_LENGTH:
        raise InvalidMedia(f"a picture's URL must begin with http:// or https:// and a host: {url[:100]!r}")
    if parts.username or parts.password:
        raise InvalidMedia("a picture's URL may not hold a name or password")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not path.isascii() or any(ord(c) <= 32 or ord(c) == 127 for c in path):
        raise InvalidMedia("a picture's URL holds characters that must be percent-encoded")
    return _Target(parts.scheme, host, port or PORTS[parts.scheme], path)


@asynccontextmanager
async def _connected(
    target: _Target, limits: MediaLimits
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    addresses = await resolve(target.host, target.port, limits.allow_private_urls)
    context = _tls() if target.scheme == "https" else None
    name = target.host if context else None
    failure: OSError = OSError("no address answered")
    for address in addresses:
        try:
            reader, writer = await asyncio.open_connection(
                address, target.port, ssl=context, server_hostname=name
            )
            break
        except OSError as error:
            failure = error
    else:
        raise failure
    try:
        yield reader, writer
    finally:
        writer.close()


async def _get(
    target: _Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: MediaLimits
) -> Fetched | str:
    http = h11.Connection(h11.CLIENT)
    headers = [
        ("Host", target.host_header),
        ("Accept", ACCEPT),
        ("Accept-Encoding", "identity"),
        ("User-Agent", "outrider"),
        ("Connection", "close"),
    ]
    request = h11.Request(method="GET", target=target.path, headers=headers)
    writer.write((http.send(request) or b"") + (http.send(h11.EndOfMessage()) or b""))
    await writer.drain()
    answer = await _next_event(http, reader)
    while isinstance(answer, h11.InformationalResponse):
        answer = await _next_event(http, reader)
    assert isinstance(answer, h11.Response)
    told = {name.decode("latin-1"): value.decode("latin-1") for name, value in answer.headers}
    if answer.status_code in REDIRECTS and "location" in told:
        return told["location"]
    if answer.status_code != 200:
        raise InvalidMedia(f"{target.host} answered {answer.status_code} instead of a picture")
    if told.get("content-encoding", "identity") != "identity":
        raise InvalidMedia(f"{target.host} compresses its answer, which was not asked for")
    if told.get("content-length", "").isdigit():
        check_size(int(told["content-length"]), limits)
    data = await _body(http, reader, limits)
    return Fetched(data, told.get("content-type", "").partition(";")[0].strip().lower())


async def _body(http: h11.Connection, reader: asyncio.StreamReader, limits: MediaLimits) -> bytes:
    parts: list[bytes] = []
    size = 0
    while not isinstance(event := await _next_event(http, reader), h11.EndOfMessage):
        assert isinstance(event, h11.Data)
        parts.append(bytes(event.data))
        size += len(event.data)
        check_size(size, limits)
    if not size:
        raise InvalidMedia("a picture's URL answers with nothing")
    return b"".join(parts)


async def _next_event(http: h11.Connection, reader: asyncio.StreamReader) -> object:
    while (event := http.next_event()) is h11.NEED_DATA:
        http.receive_data(await reader.read(READ_BYTES))
    if event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
        raise h11.RemoteProtocolError("the answer ended early")
    return event


def _tls() -> ssl.SSLContext:
    """With the authorities that Python packages use, where the system's are not found."""
    try:
        import certifi
    except ImportError:
        return ssl.create_default_context()
    return ssl.create_default_context(cafile=certifi.where())
