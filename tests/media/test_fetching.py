"""Fetching from a web server on this machine."""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.media import addresses, fetching
from outrider.media.addresses import is_public
from outrider.media.fetching import fetch
from outrider.media.limits import InvalidMedia, MediaLimits
from outrider.media.loader import MediaItem, MediaLoader

LIMITS = MediaLimits(max_image_bytes=1000, allow_private_urls=True)
HASTY = replace(LIMITS, fetch_timeout_s=0.5, fetch_total_s=1.0)
Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served(handler: Handler, host: str = "127.0.0.1", port: int = 0, **options: Any):
    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(await reader.readuntil(b"\r\n\r\n"), writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(on_connection, host, port, **options)
    async with server:
        yield f"http://{host}:{server.sockets[0].getsockname()[1]}"


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


def test_a_request_carries_no_cookies_and_no_credentials():
    seen = []

    async def handler(request: bytes, writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        writer.write(ok(b"abc"))

    assert run(handler, path="/./a.png?x=%20y|'[1]") == b"abc"
    assert seen[0].startswith(b"GET /./a.png?x=%20y|'[1] HTTP/1.1\r\n")  # as the client wrote the URL
    assert seen[0].count(b"\r\nHost: 127.0.0.1:") == 1
    assert b"\r\nAccept-Encoding: identity\r\n" in seen[0]
    assert not any(word in seen[0].lower() for word in (b"cookie", b"authorization", b"referer"))


def test_chunked_and_unbounded_bodies_are_read_whole():
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
    assert run(answering(chunked)) == b"abc"
    assert run(answering(b"HTTP/1.0 200 OK\r\n\r\nabc")) == b"abc"


def test_too_many_bytes_are_refused_whether_announced_or_not():
    refused(answering(ok(bytes(1001))), "1,000")
    refused(answering(b"HTTP/1.0 200 OK\r\n\r\n" + bytes(5000)), "1,000")

    async def endless(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"64\r\n" + bytes(100) + b"\r\n")
            await writer.drain()

    refused(endless, "too large: the limit is 1,000 bytes")


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "404"),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n", "500"),
        (b"HTTP/1.1 206 Part\r\nContent-Length: 1\r\n\r\na", "206"),
        (ok(b""), "no content"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", "HTTP"),
        (ok(b"abc", "Content-Encoding: gzip"), "compress"),
        (b"hello\r\n\r\n", "HTTP"),
        (b"", "HTTP"),
    ],
)
def test_other_answers_are_refused(answer, match):
    refused(answering(answer), match)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:{closed_port}/", "connection failed"),
        ("http://no-such-host.invalid/", "the host cannot be resolved"),
        ("{base}/redirect-to-http://secret.invalid/", "the host cannot be resolved"),
        ("{base}/redirect-to-ftp://secret/", "the URL, and those that it redirects to, must begin with "
         "http:// or https:// and a host"),
        ("{base}/redirect-to-http://[secret", "the URL, or one that it redirects to, cannot be parsed"),
        ("{base}/secret", "the answer is not valid HTTP"),
    ],
)  # fmt: skip
def test_client_learns_which_image_and_a_fixed_reason(url, reason):
    """Neither texts of exceptions nor what another server sent."""

    async def handler(request: bytes, writer: asyncio.StreamWriter) -> None:
        target = request.split()[1].decode()
        writer.write(
            redirect(target.partition("-to-")[2]) if "-to-" in target else b"HTTP/1.1 secret\r\n\r\n"
        )

    async def go():
        with socket.create_server(("127.0.0.1", 0)) as closed:
            closed_port = closed.getsockname()[1]
        loader = MediaLoader(LIMITS, lambda image: image)
        async with served(handler) as base:
            wanted = url.format(base=base, closed_port=closed_port)
            items = [MediaItem("image", "data:image/png;base64,AAAA"), MediaItem("image", wanted)]
            with pytest.raises(InvalidMedia) as refusal:
                await loader.load(items)
        loader.close()
        return str(refusal.value)

    assert asyncio.run(go()) == f"image or video 2 of 2 cannot be fetched: {reason}"


def test_a_redirect_is_followed_and_too_many_are_not():
    assert run(answering(redirect("/b"), redirect("c"), ok(b"abc"))) == b"abc"
    refused(answering(redirect("/loop")), "redirected more than 3")
    refused(answering(redirect("file:///etc/passwd")), "http")
    refused(answering(redirect("data:image/png,abc")), "http")
    refused(answering(redirect("http://[::1")), "cannot be parsed")


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

    for handler in (silent, drip, slow_redirects):  # one that is not given up ends with another message
        refused(handler, "timed out after", HASTY)


def test_private_addresses_are_refused_also_after_a_redirect(monkeypatch):
    """The first host is allowed; the target of the redirect is checked like a first URL."""
    real = addresses.is_public
    closed = replace(LIMITS, allow_private_urls=False)
    refused(answering(ok(b"abc")), "public", closed)

    monkeypatch.setattr(addresses, "is_public", lambda a: a == "127.0.0.1" or real(a))
    for host in ("127.0.0.2", "[::1]", "169.254.169.254", "10.0.0.1", "localhost.localdomain"):
        refused(
            answering(redirect(f"http://{host}:1/"), ok(b"abc")),
            "public|cannot be resolved|timed out",
            closed,
        )


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert run(answering(ok(b"abc"))) == b"abc"


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "identity, gzip"])
def test_a_compressed_answer_is_refused_before_its_body_is_read(encoding):
    async def handler(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Encoding: {encoding}\r\n\r\n".encode())
        await writer.drain()
        await asyncio.sleep(5)  # the body never comes

    refused(handler, "compress")


def test_a_second_lookup_of_a_name_cannot_change_the_address(monkeypatch):
    """One port of two addresses. The name leads to the first address once, then to the second address.

    Code that resolves the name a second time, here or in a library, would reach the second server.
    """
    lookups, requests = [], []

    async def first(request: bytes, writer: asyncio.StreamWriter) -> None:
        requests.append(("first", request.partition(b"Host: ")[2].partition(b"\r\n")[0]))
        writer.write(redirect("/again") if len(requests) == 1 else ok(b"abc"))

    async def second(request: bytes, writer: asyncio.StreamWriter) -> None:
        requests.append(("second", b""))
        writer.write(ok(b"private"))

    def lookup(host, port, *args, **kwargs):
        assert host == "rebind.test", "only the name is looked up, never an address"
        lookups.append(host)
        address = "127.0.0.1" if len(lookups) == 1 else "127.0.0.9"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    async def go(limits: MediaLimits, path: str):
        async with served(first) as base, served(second, "127.0.0.9", int(base.rpartition(":")[2])):
            monkeypatch.setattr(socket, "getaddrinfo", lookup)
            monkeypatch.setattr(addresses, "is_public", lambda address: address == "127.0.0.1")
            try:
                return await fetch(f"http://rebind.test:{base.rpartition(':')[2]}{path}", limits)
            finally:
                monkeypatch.undo()

    closed = replace(LIMITS, allow_private_urls=False)
    with pytest.raises(InvalidMedia, match="public"):  # a redirect is looked up anew
        asyncio.run(go(closed, "/"))
    assert (len(lookups), [server for server, _ in requests]) == (2, ["first"])
    lookups.clear()
    assert asyncio.run(go(closed, "/")) == b"abc"
    assert (len(lookups), [server for server, _ in requests]) == (1, ["first", "first"])
    assert requests[1][1].startswith(b"rebind.test:")


CERTIFICATE = Path(__file__).with_name("pinned_test.pem")  # self-signed, for pinned.test


def test_a_certificate_is_checked_by_name_while_the_address_is_pinned(monkeypatch, caplog):
    caplog.set_level("INFO")
    trusting, server = (
        ssl.create_default_context(cafile=str(CERTIFICATE)),
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
    )
    server.load_cert_chain(CERTIFICATE)
    names = []
    server.sni_callback = lambda _, name, __: names.append(name)

    async def go(host: str):
        async with served(answering(ok(b"abc")), ssl=server) as base:
            real = socket.getaddrinfo

            def lookup(asked, port, *args, **kwargs):
                return real("127.0.0.1" if asked == host else asked, port, *args, **kwargs)

            monkeypatch.setattr(socket, "getaddrinfo", lookup)
            return await fetch(f"https://{host}:{base.rpartition(':')[2]}/", LIMITS)

    with pytest.raises(InvalidMedia, match=r"^connection failed$"):
        asyncio.run(go("pinned.test"))  # self-signed: no authority vouches for the certificate
    assert "certificate verify failed" in caplog.text
    monkeypatch.setattr(fetching, "_tls_context", lambda: trusting)
    assert asyncio.run(go("pinned.test")) == b"abc"
    with pytest.raises(InvalidMedia, match=r"^connection failed$"):
        asyncio.run(go("other.test"))
    assert "Hostname mismatch" in caplog.text
    assert names == ["pinned.test", "pinned.test", "other.test"]


def test_the_address_that_was_checked_is_the_one_connected_to(monkeypatch):
    """A name that would lead elsewhere at a second lookup is looked up only once."""
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

    assert asyncio.run(go()) == b"abc"
    assert asked == ["rebind.test"]


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
     "::1", "::", "fe80::1%eth0", "fc00::1", "fec0::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
     "2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b:1:7f00:0:100::", "64:ff9b:1:a00:0:100:808:808",
     "224.0.0.1", "ff02::1", "255.255.255.255",
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
