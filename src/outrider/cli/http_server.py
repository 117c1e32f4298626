"""uvicorn with a shutdown that tells the application first: no new requests, time for those under way."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

KEEP_ALIVE_S = 75  # idle connections: longer than clients and proxies keep theirs
GRACE_S = 5  # past the drain, for last bytes


def http_config(app: ASGIApp, drain_s: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        timeout_keep_alive=KEEP_ALIVE_S,
        access_log=False,  # the application writes its own, with request ids
        timeout_graceful_shutdown=math.ceil(drain_s) + GRACE_S,
        server_header=False,
    )


class HttpServer(uvicorn.Server):
    """`on_ready` is called when clients are let in, `drain` when the process is told to end."""

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
