"""GET /v1/status/stream: one snapshot for all readers, nothing without a reader, and an end at a shutdown."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import httpx
import pytest
from asgi_caller import Caller
from fake_backend import Client, FakeBackend, server
from pydantic import TypeAdapter
from step_rows import row, step

from outrider.api.app import Server
from outrider.api.operations import status_stream
from outrider.api.operations.answer_models import StatusEvent
from outrider.api.operations.status_stream import MAX_READERS, MAX_STEPS
from patience import PATIENCE_S, until
from server_process import ServerProcess

PATH = "/v1/status/stream"


class StatusCaller(Caller):
    def __init__(self, **headers: str) -> None:
        super().__init__(PATH, {})
        self.scope["method"] = "GET"
        self.scope["headers"] = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._body = b""
        self.task: asyncio.Task[None] | None = None

    def start(self, made: Server) -> None:
        self.task = asyncio.create_task(self.call(made))

    @property
    def events(self) -> list[Any]:
        blocks = self.received.decode().split("\n\n")[:-1]
        return [json.loads(block.removeprefix("data: ")) for block in blocks if block.startswith("data: ")]

    async def after(self, num_steps: int) -> Any:
        """The first event after so many steps."""
        await until(lambda: self.events and self.events[-1]["steps"] >= num_steps)
        return next(event for event in self.events if event["steps"] >= num_steps)

    async def leave(self) -> None:
        assert self.task is not None
        self.gone.set()
        await asyncio.wait_for(self.task, PATIENCE_S)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_stream, "INTERVAL_S", 0.01)
    monkeypatch.setattr(status_stream, "IDLE_INTERVAL_S", 0.05)


@pytest.fixture
def made() -> Server:
    """A server on which a request runs, so that its rows are shown."""
    made = server(FakeBackend())
    made.context.live.admission.open()
    return made


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE_S))


def test_an_event_has_what_each_row_did_since_the_last_one(made: Server) -> None:
    async def work() -> None:
        caller = StatusCaller()
        caller.start(made)
        await until(lambda: caller.events)
        metrics = made.context.live.metrics.steps
        picture = replace(row(2, 8, start=0, num_prompt=20), has_images=True)
        step(metrics, (row(1, 4, 3), 3), (picture, 0), waiting=5, cache=700)
        later = (row(1, 4, 3, start=13), 1), (replace(picture, start=8), 0)
        step(metrics, *later, waiting=5, cache=700)
        event = await caller.after(2)
        assert event["rows"] == [
            {
                "sequence": 1,
                "state": "decode",
                "prompt_tokens": 5,
                "cells": 17,
                "depth": 3,
                "committed": 4,
                "accepted": 2,
                "rejected": 4,
                "images": False,
                "strides": [[3, 3], [3, 1]],
            },
            {
                "sequence": 2,
                "state": "prompt",
                "prompt_tokens": 20,
                "cells": 16,
                "depth": 0,
                "committed": 0,
                "accepted": 0,
                "rejected": 0,
                "images": True,
                "strides": [],
            },
        ]
        assert (event["waiting"], event["cache_bytes"], event["steps"]) == (5, 700, 2)
        assert (event["committed_tokens"], event["prefilled_tokens"]) == (4, 16)
        assert event["accepted_by_position"][:3] == [1, 1, 0]
        await until(lambda: caller.events[-1] != event)  # a long step: its rows are still shown
        assert [shown["strides"] for shown in caller.events[-1]["rows"]] == [[], []]
        await caller.leave()

    run(work())


def test_events_are_as_described(made: Server) -> None:
    document = made.app.openapi()
    operation = document["paths"][PATH]["get"]
    item = operation["responses"]["200"]["content"]["text/event-stream"]["itemSchema"]
    schema = item["properties"]["data"]["contentSchema"]
    assert set(operation["responses"]) >= {"200", "429", "503"}
    assert "application/json" not in operation["responses"]["200"]["content"]

    async def work() -> None:
        caller = StatusCaller()
        caller.start(made)
        await until(lambda: caller.events)
        step(made.context.live.metrics.steps, (row(1, 4, 3), 3))
        await until(lambda: caller.events[-1]["rows"])
        for event in caller.events:
            TypeAdapter(StatusEvent).validate_python(event, strict=True)
            assert event.keys() == schema["properties"].keys()
        await caller.leave()

    run(work())


def test_nothing_is_collected_unless_somebody_reads(made: Server) -> None:
    metrics = made.context.live.metrics.steps

    async def work() -> None:
        step(metrics, (row(1, 1), 1))
        assert metrics._watched is None
        callers = [StatusCaller(), StatusCaller()]
        for caller in callers:
            caller.start(made)
        await until(lambda: all(caller.events for caller in callers))
        watched = metrics._watched
        assert watched is not None
        await callers[0].leave()
        await asyncio.sleep(0.05)
        assert metrics._watched is watched
        await callers[1].leave()
        await until(lambda: metrics._watched is None)
        third = StatusCaller()  # and it begins again
        third.start(made)
        await until(lambda: third.events)
        assert metrics._watched is not None
        await third.leave()

    run(work())


def test_a_reader_that_joins_at_the_moment_when_the_last_one_leaves_is_served(made: Server) -> None:
    async def work() -> None:
        first, second = StatusCaller(), StatusCaller()
        first.start(made)
        await until(lambda: first.events)
        first.gone.set()
        second.start(made)
        await first.leave()
        await until(lambda: len(second.events) >= 3)
        await second.leave()

    run(work())


def test_one_snapshot_serves_all_readers(made: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    take = status_stream.Snapshots.take

    def counted(*args: Any) -> Any:
        taken.append(1)
        return take(*args)

    monkeypatch.setattr(status_stream.Snapshots, "take", counted)

    async def work() -> None:
        callers = [StatusCaller() for _ in range(8)]
        for caller in callers:
            caller.start(made)
        await until(lambda: all(len(caller.events) >= 3 for caller in callers))
        assert len(taken) < sum(len(caller.events) for caller in callers)
        for caller in callers:
            await caller.leave()

    run(work())


def test_a_slow_reader_gets_the_newest_event_and_delays_nobody(made: Server) -> None:
    metrics = made.context.live.metrics.steps

    async def work() -> None:
        slow, quick = StatusCaller(), StatusCaller()
        slow.start(made)
        quick.start(made)
        await until(lambda: slow.events and quick.events)
        slow.reads.clear()
        for number in range(1, 21):
            step(metrics, (row(1, 1), 1))
            await until(lambda number=number: quick.events[-1]["steps"] == number)
        num_read = len(slow.events)
        slow.reads.set()
        await until(lambda: slow.events[-1]["steps"] == 20)
        assert len(slow.events) < num_read + 10  # one waited for the socket, then the newest
        await slow.leave()
        await quick.leave()

    run(work())


def test_a_row_shows_a_bounded_number_of_steps(made: Server) -> None:
    async def work() -> None:
        caller = StatusCaller()
        caller.start(made)
        await until(lambda: caller.events)
        for _ in range(5000):  # without a pause: the event loop reads them all at once
            step(made.context.live.metrics.steps, (row(1, 1), 1))
        event = await caller.after(5000)
        assert len(event["rows"][0]["strides"]) == MAX_STEPS
        assert event["committed_tokens"] == 5000
        await caller.leave()

    run(work())


def test_the_number_of_streams_is_bounded(made: Server) -> None:
    async def work() -> None:
        callers = [StatusCaller() for _ in range(MAX_READERS)]
        for caller in callers:
            caller.start(made)
        await until(lambda: all(caller.events for caller in callers))
        refused = StatusCaller()
        await asyncio.wait_for(refused.call(made), PATIENCE_S)
        assert refused.status == 429
        await callers[0].leave()
        again = StatusCaller()
        again.start(made)
        await until(lambda: again.events)
        for caller in (*callers[1:], again):
            await caller.leave()

    run(work())


def test_a_shutdown_ends_the_streams(made: Server) -> None:
    async def work() -> None:
        caller = StatusCaller()
        caller.start(made)
        await until(lambda: caller.events)
        made.context.live.drain()
        assert caller.task is not None
        await caller.task
        assert caller.events[-1]["status"] == "shutting down"
        late = StatusCaller()
        await late.call(made)
        assert late.status == 503

    run(work())


def test_it_needs_an_operators_key() -> None:
    made = server(FakeBackend(), api_key="user", operator_key="operator")
    assert Client(made, authorization="Bearer user").get(PATH).status_code == 403

    async def work() -> None:
        caller = StatusCaller(authorization="Bearer operator")
        caller.start(made)
        await until(lambda: caller.events)
        await caller.leave()

    run(work())


def test_a_real_server_shows_the_rows_of_its_steps(live: ServerProcess) -> None:
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "draft_depth": 2}
    with httpx.stream("GET", f"{live.url}{PATH}", timeout=PATIENCE_S) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: "))
        first = json.loads(next(lines).removeprefix("data: "))
        asking = threading.Thread(target=live.post, args=("/v1/completions", body))
        asking.start()
        states: set[str] = set()
        for line in lines:
            event = json.loads(line.removeprefix("data: "))
            states |= {shown["state"] for shown in event["rows"]}
            assert all(0 <= shown["accepted"] <= shown["committed"] for shown in event["rows"])
            if event["committed_tokens"] >= first["committed_tokens"] + 400:
                break
    asking.join()
    assert "decode" in states
    assert event["cache_budget_bytes"] > 0
    assert event["prefix_cache"]["budget_bytes"] > 0
