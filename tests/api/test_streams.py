"""Streams with long pauses, clients that disconnect or read slowly, and servers that shut down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from fake_backend import HELLO, USAGE, USER, FakeBackend, Gate, server

from outrider.api.app import Server
from outrider.chat.events import ChatEvent, Finished, TextDelta

GUARD_S = 60  # ends a test that hangs; no test needs so long
MANY: tuple[ChatEvent, ...] = (*(TextDelta(f"{i} ") for i in range(1000)), Finished("stop", USAGE))
BODIES = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 5},
    "/v1/completions": {"prompt": ["a", "b"], "n": 2},
}


class Caller:
    """An ASGI client that can leave, or stop reading."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.status: int | None = None
        self.received = b""
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.on_data: Callable[[], None] = lambda: None
        self._body: bytes | None = json.dumps(body).encode()
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
        }

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.received += message["body"]
            self.on_data()

    async def call(self, made: Server) -> None:
        await made.app(self.scope, self.receive, self.send)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("path", BODIES)
def test_client_that_leaves_frees_its_rows(path: str, streams: bool) -> None:
    gate = Gate(num_events=3)
    backend = FakeBackend(MANY, gate=gate)
    made = server(backend)

    async def run() -> None:
        caller = Caller(path, BODIES[path] | {"stream": streams})
        calling = asyncio.create_task(caller.call(made))
        await asyncio.wait_for(gate.holds.wait(), GUARD_S)
        caller.gone.set()
        await asyncio.wait_for(calling, GUARD_S)

    asyncio.run(run())
    assert all(stream.aborted for stream in backend.streams)
    assert made.context.live.num_live == 0
    assert not made.context.live.answers
    abandoned = made.context.live.metrics.finished.labels(_api(path), "abandoned")
    assert abandoned._value.get() == len(backend.streams)


def _api(path: str) -> str:
    return path.removeprefix("/v1/").split("/")[0]


def test_connection_that_breaks_on_write_frees_the_row() -> None:
    backend = FakeBackend(MANY)
    made = server(backend)

    async def run() -> None:
        caller = Caller("/v1/chat/completions", {"messages": USER, "stream": True})

        def fail() -> None:
            raise OSError("broken pipe")

        caller.on_data = fail
        await asyncio.wait_for(caller.call(made), GUARD_S)

    asyncio.run(run())
    assert backend.streams[0].aborted
    assert made.context.live.num_live == 0


def test_slow_reader_is_bounded_and_loses_nothing() -> None:
    backend = FakeBackend(MANY)
    made = server(backend)

    async def run() -> tuple[int, str]:
        caller = Caller("/v1/chat/completions", {"messages": USER, "stream": True})
        caller.on_data = lambda: caller.reads.clear()  # stops reading after the first chunk
        calling = asyncio.create_task(caller.call(made))
        while not made.context.live.answers:
            await asyncio.sleep(0)
        (answers,) = made.context.live.answers.values()
        for _ in range(2000):  # turns of the event loop: more than there are events
            await asyncio.sleep(0)
        num_taken = answers.choices[0].num_events + answers._queue.qsize()
        caller.on_data = lambda: None
        caller.reads.set()
        await asyncio.wait_for(calling, GUARD_S)
        return num_taken, caller.received.decode()

    num_taken, text = asyncio.run(run())
    assert num_taken < 40  # of 1000: what is not read is not taken from the engine
    chunks = [json.loads(block[6:]) for block in text.split("\n\n") if block[6:].startswith("{")]
    words = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(words) == "".join(f"{i} " for i in range(1000))


@pytest.mark.parametrize(
    ("path", "sign"),
    [
        ("/v1/chat/completions", ": keep-alive"),
        ("/v1/responses", ": keep-alive"),
        ("/v1/messages", "event: ping"),
    ],
)
def test_keep_alives_are_sent_while_no_event_comes(path: str, sign: str) -> None:
    backend = FakeBackend(HELLO)
    made = server(backend, keep_alive_s=0.01)

    async def run() -> str:
        caller = Caller(path, BODIES[path] | {"stream": True})

        async def until_two_more_signs() -> None:
            num_before = caller.received.decode().count(sign)
            while caller.received.decode().count(sign) < num_before + 2:
                await asyncio.sleep(0.001)

        backend.gate = until_two_more_signs
        await asyncio.wait_for(caller.call(made), GUARD_S)
        return caller.received.decode()

    text = asyncio.run(run())
    assert text.partition("Hello")[0].count(sign) >= 2
    assert text.count(sign) >= 2 * len(HELLO)


def test_stream_without_pauses_has_no_keep_alives() -> None:
    made = server(FakeBackend(MANY[-50:]), keep_alive_s=GUARD_S)

    async def run() -> bytes:
        caller = Caller("/v1/chat/completions", {"messages": USER, "stream": True})
        await caller.call(made)
        return caller.received

    assert b"keep-alive" not in asyncio.run(run())


def test_drain_lets_answers_end_and_then_stops_the_engine() -> None:
    gate = Gate(num_events=3)
    backend = FakeBackend(MANY, gate=gate)
    num_stops = 0

    async def run() -> str:
        made = server(backend, drain_s=0.1)

        async def stop_engine() -> None:  # like the real one: live requests end as cancelled
            nonlocal num_stops
            num_stops += 1
            for stream in backend.streams:
                stream.abort()
            gate.open()

        made.stop_engine = stop_engine
        caller = Caller("/v1/chat/completions", {"messages": USER, "stream": True})
        calling = asyncio.create_task(caller.call(made))
        await asyncio.wait_for(gate.holds.wait(), GUARD_S)
        made.drain()
        made.drain()
        await asyncio.wait_for(calling, GUARD_S)
        return caller.received.decode()

    text = asyncio.run(run())
    assert num_stops == 1
    assert "shutting down" in text
    assert text.endswith("data: [DONE]\n\n")
