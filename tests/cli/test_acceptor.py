"""Connections that never finish their TLS handshake keep nobody out."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable

import pytest

from outrider.cli import acceptor
from outrider.cli.acceptor import Acceptor
from patience import PATIENCE_S


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


def run(
    certificate: tuple[str, str] | None,
    handshake_s: float,
    use: Callable[[int], Awaitable[None]],
    listener: socket.socket,
) -> None:
    async def accepting() -> None:
        tls = None
        if certificate is not None:
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(*certificate)
        accepts = Acceptor(listener, Echo, tls, handshake_s)
        accepts.start()
        await asyncio.wait_for(use(listener.getsockname()[1]), PATIENCE_S)
        await accepts.close()

    asyncio.run(accepting())


@pytest.fixture
def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0), backlog=1024)


def client_tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def is_echoed(port: int, tls: ssl.SSLContext | None) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    writer.write(b"hello")
    echoed = await reader.readexactly(5)
    writer.close()
    return echoed == b"hello"


def test_oldest_handshake_makes_room(
    certificate: tuple[str, str], listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "MAX_HANDSHAKES", 3)

    async def use(port: int) -> None:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        for reader, _ in idle[:2]:
            assert await reader.read() == b""
        assert await is_echoed(port, client_tls())
        assert await idle[2][0].read() == b""
        assert not idle[4][0].at_eof()
        for _, writer in idle:
            writer.close()

    run(certificate, PATIENCE_S, use, listener)


def test_handshake_has_a_time_limit_and_garbage_ends_one_connection(
    certificate: tuple[str, str], listener: socket.socket
) -> None:
    async def use(port: int) -> None:
        silent, _ = await asyncio.open_connection("127.0.0.1", port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await reader.read()
        assert await silent.read() == b""

    run(certificate, 0.3, use, listener)


def test_burst_without_tls(listener: socket.socket) -> None:
    async def use(port: int) -> None:
        assert all(await asyncio.gather(*(is_echoed(port, None) for _ in range(300))))

    run(None, 1.0, use, listener)
