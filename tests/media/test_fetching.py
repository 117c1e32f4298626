"""Fetching, against a server of our own on this machine."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from outrider.media import addresses
from outrider.media.addresses import is_public
from outrider.media.fetching import fetch
from outrider.media.limits import InvalidMedia, MediaLimits

LIMITS = MediaLimits(max_image_bytes=1000, allow_private_urls=True)
HASTY = replace(LIMITS, fetch_timeout_s=0.5, fetch_total_s=1.0)
Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served(handler: Handler):
    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(await reader.readuntil(b"\r\n\r\n"), writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def answering(*answers: bytes) -> Handler:
    left = list(answers)

    async def handler(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(left.pop(0) if len(left) > 1 else left[0])

    return handler


def ok(body: bytes, *headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", "Content-Type: Image/PNG; a=b", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def redirect(where: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {where}\r\nContent-Length: 0\r\n\r\n".encode()


def run(handler: Handler, limits: MediaLimits = LIMITS, path: str = "/a.png"):
    async def go():
        async with served(handler) as base:
            return await fetch(base + path, limits)

    return asyncio.run(go())


def refused(handler: Handler, match: str, limits: MediaLimits = LIMITS) -> None:
    with pytest.raises(InvalidMedia, match=match):
        run(handler, limits)


def test_a_picture_is_fetched_with_nothing_of_ours_in_the_request():
    seen = []

    async def handler(request: bytes, writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        writer.write(ok(b"abc"))

    found = run(handler, path="/a.png?x=%20y")
    assert (found.data, found.media_type) == (b"abc", "image/png")
    assert seen[0].startswith(b"GET /a.png?x=%20y HTTP/1.1\r\n")
    assert not any(word in seen[0].lower() for word in (b"cookie", b"authorization", b"referer"))


def test_chunked_and_unbounded_bodies_are_read_whole():
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
    assert run(answering(chunked)).data == b"abc"
    assert run(answering(b"HTTP/1.0 200 OK\r\n\r\nabc")).data == b"abc"


def test_too_many_bytes_are_refused_whether_announced_or_not():
    refused(answering(ok(bytes(1001))), "1,000")
    refused(answering(b"HTTP/1.0 200 OK\r\n\r\n" + bytes(5000)), "1,000")

    async def endless(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"64\r\n" + bytes(100) + b"\r\n")
            await writer.drain()

    refused(endless, "1,000")


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "404"),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n", "500"),
        (b"HTTP/1.1 206 Part\r\nContent-Length: 1\r\n\r\na", "206"),
        (ok(b""), "nothing"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", "HTTP"),
        (ok(b"abc", "Content-Encoding: gzip"), "compress"),
        (b"hello\r\n\r\n", "HTTP"),
        (b"", "HTTP"),
    ],
)
def test_other_answers_are_refused(answer, match):
    refused(answering(answer), match)


def test_a_redirect_is_followed_and_too_many_are_not():
    assert run(answering(redirect("/b"), redirect("c"), ok(b"abc"))).data == b"abc"
    refused(answering(redirect("/loop")), "redirected more than 3")
    refused(answering(redirect("file:///etc/passwd")), "http")
    refused(answering(redirect("data:image/png,abc")), "http")


def test_slow_and_silent_servers_are_given_up():
    async def silent(request: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(5)

    async def drip(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(100):
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)

    async def slow_redirects(request: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.4)
        writer.write(redirect("/again"))

    for handler in (silent, drip, slow_redirects):
        refused(handler, "within", HASTY)


def test_private_addresses_are_refused_also_after_a_redirect(monkeypatch):
    """The redirect's target is checked as if it had been asked for; the first host is let through by name."""
    real = addresses.is_public
    closed = replace(LIMITS, allow_private_urls=False)
    refused(answering(ok(b"abc")), "public", closed)

    monkeypatch.setattr(addresses, "is_public", lambda a: a == "127.0.0.1" or real(a))
    for host in ("127.0.0.2", "[::1]", "169.254.169.254", "10.0.0.1", "localhost.localdomain"):
        refused(answering(redirect(f"http://{host}:1/"), ok(b"abc")), "public|not known", closed)


def test_the_address_that_was_checked_is_the_one_connected_to(monkeypatch):
    """A name that resolves differently the second time does not get a second time."""
    asked = []

    async def go():
        async with served(answering(ok(b"abc"))) as base:
            port = int(base.rpartition(":")[2])
            loop = asyncio.get_running_loop()
            real = loop.getaddrinfo

            async def rebinding(host, *args, **kwargs):
                if host != "rebind.test":
                    assert host == "127.0.0.1"  # a literal: nothing is looked up
                    return await real(host, *args, **kwargs)
                asked.append(host)
                address = "127.0.0.1" if len(asked) == 1 else "127.0.0.9"
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

            monkeypatch.setattr(loop, "getaddrinfo", rebinding)
            return await fetch(f"http://rebind.test:{port}/", LIMITS)

    assert asyncio.run(go()).data == b"abc"
    assert asked == ["rebind.test"]


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
     "::1", "::", "fe80::1%eth0", "fc00::1", "fec0::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
     "2002:7f00:1::", "64:ff9b::7f00:1", "224.0.0.1", "ff02::1", "255.255.255.255",
     "240.0.0.1", "192.0.2.1", "nonsense"],
)  # fmt: skip
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:1.1.1.1"])
def test_addresses_that_are_public(address):
    assert is_public(address)


@pytest.mark.parametrize(
    "url",
    ["http://", "http:///a", "http://user:secret@host/", "http://host:99999/", "http://[bad/",
     "http://host/a b", "http://host/a\r\nX: y", "http://2130706433.invalid/", "http://host/" + "a" * 9000],
)  # fmt: skip
def test_urls_that_cannot_be_used_are_refused(url):
    with pytest.raises(InvalidMedia):
        asyncio.run(fetch(url, LIMITS))
