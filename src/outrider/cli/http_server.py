"""uvicorn with a graceful shutdown: the application refuses new requests and finishes the running ones."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from outrider.api.operations.metrics import Metrics
from outrider.api.settings import ServerSettings
from outrider.cli.acceptor import Acceptor
from outrider.cli.http_protocol import ConnectionLimits, limited_protocol
from outrider.engine.heartbeat import IDLE, Heartbeat

log = logging.getLogger(__name__)

# Idle connections close after this time. It is longer than the idle time of common proxies (nginx: 60 s), so
# that they do not send a request into a connection that the server is closing.
KEEP_ALIVE_S = 75
GRACE_S = 5  # time after the drain to send the last bytes; chosen by hand


def http_config(
    app: ASGIApp, settings: ServerSettings, metrics: Metrics, tls: ssl.SSLContext | None
) -> uvicorn.Config:
    limits = ConnectionLimits(
        settings.max_connections,
        settings.header_timeout_s,
        settings.write_timeout_s,
        lambda reason: metrics.refusals.labels(reason).inc(),
    )
    return uvicorn.Config(
        app,
        log_config=None,
        log_level="error",  # no line for every client that does not speak HTTP: a metric counts them
        timeout_keep_alive=KEEP_ALIVE_S,
        access_log=False,  # RequestLog writes the access log, with request ids
        timeout_graceful_shutdown=GRACE_S,
        server_header=False,
        http=limited_protocol(limits),
        ws="none",  # there are no WebSocket routes, and their connections would have no time limits
        ssl_context_factory=None if tls is None else lambda *_: tls,
    )


class HttpServer(uvicorn.Server):
    """Calls `on_ready` when it accepts connections. While it drains it still accepts them and answers 503."""

    def __init__(
        self,
        config: uvicorn.Config,
        on_ready: Callable[[], None],
        drain: Callable[[], asyncio.Task[None]],
        heartbeat: Heartbeat,
        handshake_s: float,
    ) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._drain = drain
        self._heartbeat = heartbeat  # of the event loop
        self._handshake_s = handshake_s  # for a TLS handshake
        self._acceptors: list[Acceptor] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def stop(self) -> None:
        """Drain, then end. For any thread, and for signal handlers. No effect on a server that has ended."""
        if self._loop is None:
            self.should_exit = True
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(lambda: self._drain().add_done_callback(self._end))

    def _end(self, drained: asyncio.Task[None]) -> None:
        if not drained.cancelled() and (error := drained.exception()) is not None:
            log.error("the engine could not be stopped", exc_info=error)
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """`serve` handles the signals, also before and after this server runs."""
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._acceptors = [
            Acceptor(listener, self._new_protocol, self.config.ssl, self._handshake_s)
            for listener in sockets or ()
        ]
        for acceptor in self._acceptors:
            acceptor.start()
        self._on_ready()

    def _new_protocol(self) -> asyncio.Protocol:
        config, state = self.config, self.lifespan.state
        protocol_class: Any = config.http_protocol_class
        return cast(asyncio.Protocol, protocol_class(config, self.server_state, state))

    async def on_tick(self, counter: int) -> bool:
        self._heartbeat.enter("event loop")
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._heartbeat.enter(IDLE)  # no more ticks; from here on the hard end is the limit
        for acceptor in self._acceptors:
            await acceptor.close()
        await super().shutdown(sockets)
