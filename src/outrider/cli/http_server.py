"""uvicorn with a graceful shutdown: the application refuses new requests and finishes the running ones."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

# Idle connections close after this time. It is longer than the idle time of common proxies (nginx: 60 s), so
# that they do not send a request into a connection that the server is closing.
KEEP_ALIVE_S = 75
GRACE_S = 5  # time after the drain to send the last bytes; chosen by hand


def http_config(app: ASGIApp, drain_s: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        timeout_keep_alive=KEEP_ALIVE_S,
        access_log=False,  # RequestLog writes the access log, with request ids
        timeout_graceful_shutdown=math.ceil(drain_s) + GRACE_S,
        server_header=False,
    )


class HttpServer(uvicorn.Server):
    """Calls `on_ready` when it accepts connections, and `drain` on SIGINT or SIGTERM."""

    def __init__(
        self, config: uvicorn.Config, on_ready: Callable[[], None], drain: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._drain = drain
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._drain)
        super().handle_exit(sig, frame)
