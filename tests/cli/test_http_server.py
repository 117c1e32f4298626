"""uvicorn as `outrider serve` runs it."""

from __future__ import annotations

import asyncio

import uvicorn

from outrider.cli.http_server import HttpServer
from outrider.engine.heartbeat import Heartbeat


async def app(scope: object, receive: object, send: object) -> None:
    raise AssertionError("no request is sent")


def test_signal_after_the_end_has_no_effect() -> None:
    """After a failure of the engine the server ends by itself, and a signal may come while it saves files."""

    def drain() -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(asyncio.sleep(0))

    config = uvicorn.Config(app, port=0, lifespan="off", log_config=None)
    server = HttpServer(config, lambda: server.stop(), drain, Heartbeat(), 1.0)
    server.run()
    server.stop()
