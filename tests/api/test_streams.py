"""Streams with long pauses, clients that disconnect or read slowly, and servers that shut down."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from asgi_caller import Caller
from fake_backend import HELLO, USAGE, USER, FakeBackend, FakeStream, Gate, server

from outrider.chat.events import ChatEvent, Finished, TextDelta

GUARD_S = 60  # ends a test that hangs; no test needs so long
MANY: tuple[ChatEvent, ...] = (*(TextDelta(f"{i} ") for i in range(1000)), Finished("stop", USAGE))
BODIES = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 5},
    "/v1/completions": {"prompt": ["a", "b"], "n": 2},
}


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


@pytest.mark.parametrize("path", [*BODIES, "/v1/messages/count_tokens", "/v1/responses/input_tokens"])
def test_client_that_leaves_early_frees_its_place(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for its prompt to be rendered."""
    backend = FakeBackend()
    made = server(backend)

    async def run() -> None:
        is_preparing = asyncio.Event()

        async def never(*_: Any) -> None:
            is_preparing.set()
            await asyncio.get_running_loop().create_future()

        for name in ("prepare", "prepare_text", "count_tokens"):
            monkeypatch.setattr(backend, name, never)
        caller = Caller(path, BODIES[next(known for known in BODIES if path.startswith(known))])
        calling = asyncio.create_task(caller.call(made))
        await asyncio.wait_for(is_preparing.wait(), GUARD_S)
        assert made.context.live.num_live > 0
        caller.gone.set()
        await asyncio.wait_for(calling, GUARD_S)

    asyncio.run(run())
    assert made.context.live.num_live == 0
    assert not backend.streams


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


def test_disconnect_in_the_middle_is_logged_as_such(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    gate = Gate(num_events=1)
    made = server(FakeBackend(MANY, gate=gate))

    async def run() -> None:
        for streams in (True, False):
            caller = Caller("/v1/chat/completions", {"messages": USER, "stream": streams})
            calling = asyncio.create_task(caller.call(made))
            await asyncio.wait_for(gate.holds.wait(), GUARD_S)
            caller.gone.set()
            await asyncio.wait_for(calling, GUARD_S)
        uploading = Caller("/v1/chat/completions", {})
        uploading._body = None
        uploading.gone.set()
        await asyncio.wait_for(uploading.call(made), GUARD_S)

    asyncio.run(run())
    lines = [record.getMessage() for record in caplog.records if record.name == "outrider.access"]
    assert len(lines) == 3
    for line in lines:
        assert line.startswith("POST /v1/chat/completions 499 ")
        assert line.endswith("(client_closed)")
    assert not next(iter(made.context.live.metrics.refusals.collect())).samples


@pytest.mark.parametrize("is_draining", [True, False])
def test_body_is_not_read_while_no_answer_can_be_started(is_draining: bool) -> None:
    made = server(FakeBackend(), max_rows=1, max_queue=0)
    made.context.live.admission.open()
    made.context.live.admission.is_draining = is_draining

    async def run() -> int | None:
        caller = Caller("/v1/chat/completions", {"messages": USER})

        async def receive() -> dict[str, Any]:
            raise AssertionError("the body is read")

        await made.app(caller.scope, receive, caller.send)  # type: ignore[arg-type]
        return caller.status

    assert asyncio.run(run()) == (503 if is_draining else 429)


class WaitingBackend(FakeBackend):
    """Its requests never get a row."""

    def _stream(self, request: Any) -> FakeStream:
        stream = super()._stream(request)
        given_up = asyncio.Event()
        stream.abort_if_waiting = given_up.set  # type: ignore[method-assign]
        stream._gate = given_up.wait  # type: ignore[assignment]
        stream._events = (Finished("queue_timeout", USAGE),)
        return stream


@pytest.mark.parametrize("path", BODIES)
def test_request_without_a_row_ends_with_a_503(path: str) -> None:
    made = server(WaitingBackend(), queue_timeout_s=0.01)

    async def run(streams: bool) -> Caller:
        caller = Caller(path, BODIES[path] | {"stream": streams})
        await asyncio.wait_for(caller.call(made), GUARD_S)
        return caller

    assert asyncio.run(run(False)).status == 503
    assert b"--queue-timeout" in asyncio.run(run(True)).received
    assert made.context.live.num_live == 0
    assert made.context.live.metrics.refusals.labels("queue_timeout")._value.get() == 2


def test_time_limit_holds_while_the_request_is_prepared() -> None:
    class Slow(FakeBackend):
        async def prepare(self, request: Any, num_answers: int = 1) -> Any:
            await asyncio.sleep(GUARD_S)

        async def count_tokens(self, request: Any) -> int:
            await asyncio.sleep(GUARD_S)
            return 0

    async def run(path: str = "/v1/chat/completions", **limits: Any) -> int | None:
        made = server(Slow(), **limits)
        caller = Caller(path, {"messages": USER, "input": "Hi", "stream": True})
        await asyncio.wait_for(caller.call(made), GUARD_S)
        assert made.context.live.num_live == 0
        return caller.status

    assert asyncio.run(run(request_timeout_s=0.01)) == 504
    assert asyncio.run(run(queue_timeout_s=0.01)) == 503
    for path in ("/v1/messages/count_tokens", "/v1/responses/input_tokens"):
        assert asyncio.run(run(path, request_timeout_s=0.01)) == 504
