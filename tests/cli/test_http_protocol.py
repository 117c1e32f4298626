"""Connections without a network: which time limit runs when, and what happens at its end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from outrider.cli.http_protocol import (
    DISCARD_S,
    FREE_CHUNKS,
    ConnectionLimits,
    LimitedProtocol,
    limited_protocol,
)

HEADER_S, WRITE_S = 7.0, 11.0
REQUEST = b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 3\r\n\r\n"


class Timer:
    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self.seconds = seconds
        self.call = call
        self.is_live = True

    def cancel(self) -> None:
        self.is_live = False


class Clock:
    """The event loop, except that its timers wait for the test."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.timers: list[Timer] = []

    def call_later(self, seconds: float, call: Callable[..., None], *args: Any) -> Timer:
        self.timers.append(Timer(seconds, lambda: call(*args)))
        return self.timers[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    @property
    def running(self) -> list[float]:
        return [timer.seconds for timer in self.timers if timer.is_live]

    def expire(self, seconds: float) -> None:
        (timer,) = [timer for timer in self.timers if timer.is_live and timer.seconds == seconds]
        timer.cancel()
        timer.call()


class Wire:
    """A transport that writes nowhere."""

    def __init__(self) -> None:
        self.written = b""
        self.num_unsent = 0
        self.end = ""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if name == "socket" else default

    def setsockopt(self, *_: Any) -> None: ...

    def getpeername(self) -> tuple[str, int]:
        return ("test", 1)

    getsockname = getpeername
    family = None

    def write(self, data: bytes) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def is_closing(self) -> bool:
        return bool(self.end)

    def close(self) -> None:
        self.end = self.end or "closed"

    def abort(self) -> None:
        self.end = "aborted"

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class World:
    """A server whose application answers when the test lets it, without reading bodies."""

    def __init__(self, max_connections: int = 10) -> None:
        self.clock = Clock(asyncio.get_running_loop())
        self.refusals: Counter[str] = Counter()
        self.may_answer = asyncio.Event()
        self.scopes: list[Any] = []
        limits = ConnectionLimits(
            max_connections, HEADER_S, WRITE_S, lambda reason: self.refusals.update([reason])
        )
        self._class = limited_protocol(limits)
        self._config = uvicorn.Config(
            self._app, interface="asgi3", log_config=None, http=self._class, ws="none"
        )
        self._state = ServerState()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await self.may_answer.wait()
        await send({"type": "http.response.body", "body": b"b"})

    def connect(self) -> tuple[Any, Wire]:
        protocol, wire = self._class(self._config, self._state, {}, _loop=self.clock), Wire()  # type: ignore[arg-type]
        assert isinstance(protocol, LimitedProtocol)
        protocol.connection_made(wire)  # type: ignore[arg-type]
        return protocol, wire


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_time_of_headers_runs_from_the_connect_to_the_last_header() -> None:
    async def run() -> None:
        world = World()
        protocol, wire = world.connect()
        assert world.clock.running == [HEADER_S]
        for i in range(10, len(REQUEST) - 1, 10):
            protocol.data_received(REQUEST[i - 10 : i])
            assert world.clock.running == [HEADER_S]
        assert len(world.clock.timers) == 1  # no byte prolonged it
        world.clock.expire(HEADER_S)
        assert wire.written.startswith(b"HTTP/1.1 408 ")
        assert wire.end == "closed"
        assert world.refusals == {"header_timeout": 1}

    asyncio.run(run())


def test_request_that_is_being_answered_has_no_time_for_headers() -> None:
    async def run() -> None:
        world = World()
        protocol, _ = world.connect()
        protocol.data_received(REQUEST + b"abc")
        await turns()
        assert world.clock.running == []
        world.may_answer.set()
        await turns()
        assert world.clock.running == [5]  # uvicorn's own, until the next request
        protocol.data_received(b"GET")
        assert world.clock.running == [HEADER_S]

    asyncio.run(run())


def test_body_of_an_answered_request_is_discarded_for_a_while() -> None:
    async def run() -> None:
        world = World()
        world.may_answer.set()
        protocol, wire = world.connect()
        protocol.data_received(REQUEST + b"a")
        await turns()
        assert DISCARD_S in world.clock.running
        protocol.data_received(b"b")
        world.clock.expire(DISCARD_S)
        assert wire.end == "closed"
        assert world.refusals == {"unwanted_body": 1}

    asyncio.run(run())


def test_connection_goes_on_when_the_discarded_body_ends() -> None:
    async def run() -> None:
        world = World()
        world.may_answer.set()
        protocol, wire = world.connect()
        protocol.data_received(REQUEST + b"a")
        await turns()
        protocol.data_received(b"bc")
        assert world.clock.running == [HEADER_S]
        protocol.data_received(REQUEST + b"abc")
        await turns()
        assert len(world.scopes) == 2
        assert not wire.end

    asyncio.run(run())


def test_each_pause_of_a_steady_reader_has_the_whole_time() -> None:
    async def run() -> None:
        world = World()
        protocol, wire = world.connect()
        protocol.data_received(REQUEST + b"abc")
        await turns()
        for _ in range(3):
            protocol.pause_writing()
            assert world.clock.running == [WRITE_S]
            protocol.resume_writing()
            assert world.clock.running == []
        protocol.pause_writing()
        world.clock.expire(WRITE_S)
        assert wire.end == "aborted"
        assert world.scopes[0]["state"]["refusal"] == "write_timeout"
        protocol.connection_lost(None)

    asyncio.run(run())


def test_end_of_an_answer_that_is_never_read_is_given_up() -> None:
    async def run() -> None:
        world = World()
        protocol, wire = world.connect()
        protocol.data_received(REQUEST + b"abc")
        await turns()
        wire.num_unsent = 100
        world.may_answer.set()
        await turns()
        world.clock.expire(WRITE_S)
        assert wire.end == "aborted"
        assert world.refusals == {"write_timeout": 1}

    asyncio.run(run())


def test_one_connection_too_many_is_refused_if_all_have_a_request() -> None:
    async def run() -> None:
        world = World(max_connections=2)
        first, second = world.connect(), world.connect()
        for protocol, _ in (first, second):
            protocol.data_received(REQUEST + b"abc")
        await turns()
        _, refused = world.connect()
        assert refused.written.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in refused.written
        assert refused.end == "closed"
        assert not first[1].end
        assert not second[1].end
        assert world.refusals == {"connections": 1}

    asyncio.run(run())


def test_one_connection_too_many_closes_the_one_that_is_idle_longest() -> None:
    async def run() -> None:
        world = World(max_connections=2)
        busy, idle = world.connect(), world.connect()
        busy[0].data_received(REQUEST + b"abc")
        await turns()
        _, third = world.connect()
        _, fourth = world.connect()
        assert [wire.end for wire in (busy[1], idle[1], third, fourth)] == ["", "closed", "closed", ""]

    asyncio.run(run())


def test_one_connection_too_many_ends_an_answer_that_is_not_read() -> None:
    async def run() -> None:
        world = World(max_connections=3)
        stalled, finished, busy = (world.connect() for _ in range(3))
        world.may_answer.set()
        finished[0].data_received(REQUEST + b"abc")
        await turns()
        world.may_answer.clear()
        for protocol, _ in (stalled, busy):
            protocol.data_received(REQUEST + b"abc")
        await turns()
        stalled[0].pause_writing()
        for _, wire in (stalled, finished):
            wire.num_unsent = 100
        wires = [wire for _, wire in (stalled, finished, busy)]
        world.connect()
        assert [wire.end for wire in wires] == ["", "aborted", ""]  # closing would wait for its client
        last = world.connect()
        last[0].data_received(REQUEST + b"abc")
        await turns()
        world.connect()
        assert [wire.end for wire in wires] == ["aborted", "aborted", ""]

    asyncio.run(run())


def test_body_with_two_lengths_is_refused() -> None:
    async def run() -> None:
        world = World()
        protocol, wire = world.connect()
        protocol.data_received(
            REQUEST.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n") + b"0\r\n\r\n"
        )
        await turns()
        assert wire.written.startswith(b"HTTP/1.1 400 ")
        assert wire.end == "closed"
        assert not world.scopes

    asyncio.run(run())


def test_headers_of_any_length_are_refused_at_16_kib() -> None:
    async def run() -> None:
        world = World()
        protocol, wire = world.connect()
        protocol.data_received(b"GET / HTTP/1.1\r\nhost: test\r\n" + b"a: b\r\n" * 10_000 + b"\r\n")
        assert wire.written.startswith(b"HTTP/1.1 400 ")
        assert wire.end == "closed"
        assert not world.scopes
        assert world.refusals == {"malformed_http": 1}

    asyncio.run(run())


def test_body_in_tiny_chunks_is_refused() -> None:
    async def run() -> None:
        world = World()
        small, large = b"1\r\nx\r\n", b"400\r\n" + b"x" * 1024 + b"\r\n"
        for chunks, end in (
            (small * FREE_CHUNKS, ""),
            (small * (FREE_CHUNKS + 1), "aborted"),
            (large * 3000, ""),
        ):
            protocol, wire = world.connect()
            protocol.data_received(REQUEST.replace(b"content-length: 3", b"transfer-encoding: chunked"))
            await turns()
            protocol.data_received(chunks)
            assert wire.end == end

    asyncio.run(run())


def test_no_http_in_the_middle_of_an_answer_ends_the_connection() -> None:
    async def run() -> None:
        world = World()
        protocol, wire = world.connect()
        chunked = REQUEST.replace(b"content-length: 3", b"transfer-encoding: chunked")
        protocol.data_received(chunked)
        await turns()
        protocol.data_received(b"no size\r\n")
        assert wire.end == "aborted"
        assert world.refusals == {"malformed_http": 1}

    asyncio.run(run())
