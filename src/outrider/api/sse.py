"""Server-sent events: framing, signs of life in silence, and the end of work nobody reads.

Must not know what the events mean. Slow readers are bounded: `send` waits for the socket, and the engine's
outbox merges what waits.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.api.errors import ClientGone

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies: pass it on as it comes
}


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def data(value: Mapping[str, Any]) -> bytes:
    """A frame without a name: OpenAI's chat and completions."""
    return f"data: {to_json(value)}\n\n".encode()


def named(value: Mapping[str, Any]) -> bytes:
    """A frame named after the event's own type: Anthropic's messages, OpenAI's responses."""
    return f"event: {value['type']}\ndata: {to_json(value)}\n\n".encode()


class EventStreamResponse(Response):
    """Writes frames as they come. `close` is called once it is over, whoever ended it."""

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        close: Callable[[], None],
        keep_alive_s: float,
        keep_alive: bytes = COMMENT,
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._frames = frames
        self._close = close
        self._keep_alive_s = keep_alive_s
        self._keep_alive = keep_alive
        self._last_sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGone, OSError):  # either way the client has left
                await until_disconnected(receive, self._write(send))
        finally:
            self._close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._last_sent_s = time.monotonic()
        ticker = asyncio.create_task(self._tick(send))
        try:
            async for frame in self._frames:
                await _send_part(send, frame)
                self._last_sent_s = time.monotonic()
        finally:
            ticker.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _tick(self, send: Send) -> None:
        """Say something whenever nothing was said for a while: proxies and clients give up on silence."""
        while True:
            silence_s = time.monotonic() - self._last_sent_s
            if silence_s >= self._keep_alive_s:
                await _send_part(send, self._keep_alive)
                self._last_sent_s = time.monotonic()
                silence_s = 0.0
            await asyncio.sleep(self._keep_alive_s - silence_s)


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})


async def until_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; if the client hangs up first, the work is cancelled and ClientGone is raised."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
