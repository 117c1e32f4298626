"""HTTP connections with time limits. uvicorn's own protocol waits for a client without a limit.

A connection is closed if the headers of its next request do not arrive in time, if the client goes on sending
the body of a refused request, or if it does not read its answer. The middleware limits the time of bodies.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider.api.errors import REFUSAL, ApiError, openai_error
from outrider.api.middleware import MAX_HEADER_BYTES

# Seconds that a client may go on sending the body of a request that is already answered. Closing at once
# would reset the connection, and the client could lose the answer. nginx: lingering_timeout, 5 s.
DISCARD_S = 5.0
# Bytes that the kernel buffers for a client (Linux doubles the number). By default it buffers megabytes, so
# that the server would notice only late that a client does not read. Chosen by hand: 64 KiB in each round
# trip of 200 ms are 320 KB/s, and a stream of tokens needs far less.
SEND_BUFFER_BYTES = 64 << 10
# A body may have this many chunks of any size; further ones must have this size on average. Measured: h11
# parses a chunk in 6 us, so that 256 KiB of chunks with one byte each held up all clients for 0.3 s.
FREE_CHUNKS = 1000
MIN_CHUNK_BYTES = 256


@dataclass(frozen=True)
class ConnectionLimits:
    max_connections: int
    header_s: float  # for headers, from their first byte; for those of the first request, from the connect
    write_s: float  # for the client to read the answer that waits for it
    count_refusal: Callable[[str], None]


def limited_protocol(limits: ConnectionLimits) -> type[H11Protocol]:
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": limits})


class LimitedParser(h11.Connection):
    """Refuses bodies in tiny chunks, and bodies with two lengths: a proxy may have read the other one."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self._num_chunks = 0
        self._num_bytes = 0  # in the chunks of this body

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError("a request has Content-Length and Transfer-Encoding")
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > FREE_CHUNKS and self._num_bytes < MIN_CHUNK_BYTES * self._num_chunks:
                raise h11.RemoteProtocolError("the chunks of the body are too small")
        return event


class LimitedProtocol(H11Protocol):
    limits: ClassVar[ConnectionLimits]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = LimitedParser()
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._timed: tuple[str, object] | None = None  # what the read timer waits for
        self._waits_since_s = self.loop.time()  # for the client to send a request, or to read its answer

    # -- events of the connection ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection: socket.socket = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if len(self.connections) > self.limits.max_connections and not self._make_room():
            self._refuse(
                "connections",
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the server has {self.limits.max_connections} connections, its limit (--max-connections). "
                "Try again later.",
                "retry-after: 1\r\n",
            )
        self._watch_reading()

    def data_received(self, data: bytes) -> None:
        # h11 checks the size of headers only when it needs more data: so it gets the data in pieces.
        for i in range(0, len(data), MAX_HEADER_BYTES):
            if not self.transport.is_closing():
                super().data_received(data[i : i + MAX_HEADER_BYTES])
        self._watch_reading()

    def on_response_complete(self) -> None:
        self._waits_since_s = self.loop.time()
        super().on_response_complete()
        self._watch_reading()
        self._watch_writing()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._waits_since_s = self.loop.time()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._read_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    # -- reading -----------------------------------------------------------------------------------------

    def _watch_reading(self) -> None:
        """Start the time limit of what the client has to send now, unless it is running already."""
        wanted = self._wanted()
        if wanted == self._timed:
            return
        self._timed = wanted
        if self._read_timer is not None:
            self._read_timer.cancel()
        if wanted is not None:
            seconds = self.limits.header_s if wanted[0] == "headers" else DISCARD_S
            self._read_timer = self.loop.call_later(seconds, self._on_read_timeout, wanted[0])

    def _wanted(self) -> tuple[str, object] | None:
        """What the client has to send, and the request before it.

        None: nothing. Between two requests, uvicorn's own timer runs.
        """
        state = self.conn.their_state
        if self.transport.is_closing():
            return None
        if state is h11.IDLE and (self.timeout_keep_alive_task is None or self.conn.trailing_data[0]):
            return "headers", self.cycle
        if state is h11.SEND_BODY and self.cycle.response_complete:
            return "unwanted body", self.cycle
        return None

    def _on_read_timeout(self, wanted: str) -> None:
        if self.transport.is_closing():
            return
        if wanted == "headers" and self.conn.trailing_data[0]:
            seconds = f"{self.limits.header_s:g} s"
            message = f"the headers of the request did not arrive within {seconds} (--header-timeout)"
            self._refuse("header_timeout", HTTPStatus.REQUEST_TIMEOUT, message)
            return
        self.limits.count_refusal("idle_connection" if wanted == "headers" else "unwanted_body")
        self.transport.close()

    # -- writing -----------------------------------------------------------------------------------------

    def _watch_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
        if self._is_unread():
            self._write_timer = self.loop.call_later(self.limits.write_s, self._on_write_timeout)

    def _is_unread(self) -> bool:
        """True if the answer waits for the client: its stream is paused, or its end is not sent."""
        if self.flow.write_paused:
            return True
        return self.cycle.response_complete and self.transport.get_write_buffer_size() > 0

    def _on_write_timeout(self) -> None:
        if not self._is_unread():
            return
        if self.cycle.response_complete:
            self.limits.count_refusal("write_timeout")
        else:  # RequestLog counts and logs the request when its stream ends
            self.cycle.scope["state"][REFUSAL] = "write_timeout"
        self.transport.abort()

    # -- refusing ----------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        self._refuse("malformed_http", HTTPStatus.BAD_REQUEST, msg)

    def _refuse(self, reason: str, status: HTTPStatus, message: str, headers: str = "") -> None:
        """Answer without the application, and close the connection."""
        self.limits.count_refusal(reason)
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
            return
        body = json.dumps(openai_error(ApiError(status, message))).encode()
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n{headers}\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _make_room(self) -> bool:
        """Close the connection that waits longest for a request, or else for its client to read.

        False: all connections are being answered.
        """
        others = [c for c in self.connections if isinstance(c, LimitedProtocol) and c is not self]
        others = [c for c in others if not c.transport.is_closing()]
        if len(others) < self.limits.max_connections:
            return True
        waiting = [c for c in others if c.cycle is None or c.cycle.response_complete or c.flow.write_paused]
        if not waiting:
            return False
        self.limits.count_refusal("connections")
        closed = min(waiting, key=lambda other: (other.flow.write_paused, other._waits_since_s))
        # `close` would wait until the client has read everything.
        if closed.transport.get_write_buffer_size():
            closed.transport.abort()
        else:
            closed.transport.close()
        return True
