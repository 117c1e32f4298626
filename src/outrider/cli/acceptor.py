"""Accepts connections, with a limit of those in their TLS handshake.

asyncio's own server gives each handshake 60 seconds and counts none, so that idle connections would use up
the process's file descriptors. The protocol of an accepted connection has limits too: cli/http_protocol.py.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

log = logging.getLogger(__name__)

MAX_HANDSHAKES = 128  # at once; then the oldest is ended. Chosen by hand: one takes a few milliseconds
SHUTDOWN_S = 5.0  # for the client's close_notify; chosen by hand
RETRY_S = 0.1  # after an accept that failed, such as for want of file descriptors; chosen by hand


class Acceptor:
    def __init__(
        self,
        listener: socket.socket,
        new_protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        handshake_s: float,
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._new_protocol = new_protocol
        self._tls = tls
        self._handshake_s = handshake_s
        self._starting: dict[asyncio.Task[None], None] = {}  # connections, the oldest first
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._running = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Accept no more. Accepted connections go on."""
        tasks = [task for task in (self._running, *self._starting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                log.error("a connection could not be accepted: %s", error.strerror)
                await asyncio.sleep(RETRY_S)
                continue
            if len(self._starting) >= MAX_HANDSHAKES:
                next(iter(self._starting)).cancel()
            task = asyncio.create_task(self._connect(connection))
            self._starting[task] = None
            task.add_done_callback(self._starting.pop)
            await asyncio.sleep(0)  # other work has its turn between two connections of a burst

    async def _connect(self, connection: socket.socket) -> None:
        limits = {} if self._tls is None else {
            "ssl_handshake_timeout": self._handshake_s,
            "ssl_shutdown_timeout": SHUTDOWN_S,
        }  # fmt: skip
        loop = asyncio.get_running_loop()
        try:
            # OSError: the client left, or does not speak TLS, or was too slow.
            with suppress(OSError):
                await loop.connect_accepted_socket(self._new_protocol, connection, ssl=self._tls, **limits)
        except BaseException:
            connection.close()
            raise
