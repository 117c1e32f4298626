"""Downloads the content of a URL that a client sent, without trust in the client or in the web server.

The client's URL must not reach the operator's own network. So each request, redirects included, resolves the
host once, refuses private addresses, and connects to the checked address: httpx gets the address as the URL's
host, and the name only for the Host header, SNI and the certificate check. httpx never resolves a name. Size
and time are limited while the content arrives. No cookies, no credentials, no proxies, no decompression.

The message of each InvalidMedia here is one of a few fixed reasons. Texts of libraries, of the system and of
the web server go to the log only: they may describe the operator's network.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass
from functools import cache
from urllib.parse import urljoin, urlsplit

import httpx

from outrider.media.addresses import resolve
from outrider.media.limits import InvalidMedia, MediaLimits
from outrider.media.sources import MAX_URL_LENGTH

log = logging.getLogger(__name__)

PORTS = {"http": 80, "https": 443}
REDIRECTS = (301, 302, 303, 307, 308)
HEADERS = {
    "Accept": "image/*,video/*;q=0.8,*/*;q=0.1",
    "Accept-Encoding": "identity",
    "User-Agent": "outrider",
    "Connection": "close",
}


@dataclass(frozen=True)
class _RequestTarget:
    scheme: str
    host: str
    port: int
    path: str  # with the query

    def url(self, host: str) -> httpx.URL:
        return httpx.URL(scheme=self.scheme, host=host, port=self.port)


async def fetch(url: str, limits: MediaLimits) -> bytes:
    """Download the content of an http: or https: URL. Redirects are checked like the first URL."""
    try:
        async with asyncio.timeout(limits.fetch_total_s):
            for _ in range(limits.max_redirects + 1):
                found = await _request(_parse(url), limits)
                if isinstance(found, bytes):
                    return found
                url = _join(url, found)
    except TimeoutError:
        raise InvalidMedia(f"timed out after {limits.fetch_total_s:g} s") from None
    raise InvalidMedia(f"redirected more than {limits.max_redirects} times")


def _join(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError:
        log.info("a redirect of an image's URL cannot be parsed: %r", location[:100])
        raise InvalidMedia("the URL, or one that it redirects to, cannot be parsed") from None


def _parse(url: str) -> _RequestTarget:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise InvalidMedia("the URL, or one that it redirects to, cannot be parsed") from None
    if parts.scheme not in PORTS or not host or len(url) > MAX_URL_LENGTH:
        raise InvalidMedia(
            "the URL, and those that it redirects to, must begin with http:// or https:// and a host"
        )
    if parts.username or parts.password:
        raise InvalidMedia("the URL must not contain a user name or password")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not path.isascii() or any(ord(c) <= 32 or ord(c) == 127 for c in path):
        raise InvalidMedia("the URL contains characters that must be percent-encoded")
    return _RequestTarget(parts.scheme, host, port or PORTS[parts.scheme], path)


async def _request(target: _RequestTarget, limits: MediaLimits) -> bytes | str:
    """Send one request. Return the content, or the location of a redirect."""
    transport = httpx.AsyncHTTPTransport(verify=await asyncio.to_thread(_tls_context), trust_env=False)
    try:
        async with asyncio.timeout(limits.fetch_timeout_s), transport:
            response = await _connect(transport, target, limits)
            return await _read(response, limits)
    except TimeoutError:
        raise InvalidMedia(f"timed out after {limits.fetch_timeout_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        log.info("an image could not be fetched from %r: %r", target.host[:100], error)
        is_protocol = isinstance(error, httpx.ProtocolError)
        raise InvalidMedia("the answer is not valid HTTP" if is_protocol else "connection failed") from None


async def _connect(
    transport: httpx.AsyncHTTPTransport, target: _RequestTarget, limits: MediaLimits
) -> httpx.Response:
    """Send the request to the first address that accepts a connection."""
    failure = httpx.ConnectError("no address answered")
    headers = {**HEADERS, "Host": target.url(target.host).netloc.decode("ascii")}
    extensions = {"sni_hostname": target.host, "target": target.path.encode()}
    for address in await resolve(target.host, target.port, limits.allow_private_urls):
        request = httpx.Request("GET", target.url(address), headers=headers, extensions=extensions)
        try:
            return await transport.handle_async_request(request)
        except httpx.ConnectError as error:
            failure = error
    raise failure


async def _read(response: httpx.Response, limits: MediaLimits) -> bytes | str:
    if response.status_code in REDIRECTS and "location" in response.headers:
        return str(response.headers["location"])
    if response.status_code != 200:
        raise InvalidMedia(f"HTTP status {response.status_code}")
    if response.headers.get("content-encoding", "identity") != "identity":
        raise InvalidMedia("the answer is compressed, which was not requested")
    length = response.headers.get("content-length", "")
    if length.isdigit():
        _check_size(int(length), limits)
    data = bytearray()
    async for chunk in response.aiter_raw():  # as sent: httpx does not decompress
        data += chunk
        _check_size(len(data), limits)
    if not data:
        raise InvalidMedia("the answer has no content")
    return bytes(data)


def _check_size(num_bytes: int, limits: MediaLimits) -> None:
    if num_bytes > limits.max_image_bytes:
        raise InvalidMedia(f"too large: the limit is {limits.max_image_bytes:,} bytes")


@cache
def _tls_context() -> ssl.SSLContext:
    """Use the certificate authorities of the certifi package. To read them takes some 50 ms."""
    return httpx.create_ssl_context(trust_env=False)
