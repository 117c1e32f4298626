"""Streams: framing of server-sent events, keep-alive, and cancellation when the client disconnects.

Must not know what the events mean. A slow client holds a bounded number of events: `send` waits for the
socket, and the engine's outbox merges further tokens.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.api.errors import ClientGone

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"  # clients ignore lines that start with a colon
FIRST_KEEP_ALIVE_S = 1.0  # a stream that begins with a pause shows life after this time; chosen by hand
EVENT_STREAM = "text/event-stream; charset=utf-8"
HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx: forward each frame at once
}


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def data(value: Mapping[str, Any]) -> bytes:
    """A frame without an event name: OpenAI's chat and completions."""
    return f"data: {to_json(value)}\n\n".encode()


def named(value: Mapping[str, Any]) -> bytes:
    """A frame whose event name is the value's type: Anthropic's messages, OpenAI's responses."""
    return f"event: {value['type']}\ndata: {to_json(value)}\n\n".encode()


class EventBuilder(Protocol):
    """Renders chat events as the stream events of one API. One chat event can give none or several."""

    def start(self) -> list[dict[str, Any]]: ...

    def feed(self, event: Any) -> list[dict[str, Any]]: ...


async def named_frames(builder: EventBuilder, events: AsyncIterator[tuple[int, Any]]) -> AsyncIterator[bytes]:
    for rendered in builder.start():
        yield named(rendered)
    async for _, event in events:
        for rendered in builder.feed(event):
            yield named(rendered)


class EventStreamResponse(Response):
    """Sends each frame at once. Calls `close` at the end, also after an error or a disconnect."""

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        close: Callable[[], None],
        keep_alive_s: float,
        keep_alive: bytes = COMMENT,
        content_type: str = EVENT_STREAM,
    ) -> None:
        super().__init__(headers={"content-type": content_type} | HEADERS)
        del self.headers["content-length"]
        self._frames = frames
        self._close = close
        self._keep_alive_s = keep_alive_s
        self._keep_alive = keep_alive
        self._last_sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGone, OSError):  # both mean that the client has disconnected
                await until_disconnected(receive, self._write(send))
        finally:
            self._close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._last_sent_s = time.monotonic()
        keep_alives = asyncio.create_task(self._send_keep_alives(send))
        try:
            async for frame in self._frames:
                await _send_part(send, frame)
                self._last_sent_s = time.monotonic()
        finally:
            keep_alives.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_keep_alives(self, send: Send) -> None:
        """Proxies and clients close a connection on which nothing arrives for long.

        The first one comes early: the first pause is that of the prompt, and may last for minutes.
        """
        limit_s = min(FIRST_KEEP_ALIVE_S, self._keep_alive_s)
        while True:
            idle_s = time.monotonic() - self._last_sent_s
            if idle_s >= limit_s:
                await _send_part(send, self._keep_alive)
                self._last_sent_s = time.monotonic()
                idle_s, limit_s = 0.0, self._keep_alive_s
            await asyncio.sleep(limit_s - idle_s)


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})


async def until_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client disconnects first, cancel `work` and raise ClientGone."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
