"""Streams of an engine on a runner without a model: equal ids, forgotten streams, event loops that end."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import pytest
from engine_runner import ENDLESS, SHORT, WAIT_S, EngineRunner, end_of, submit

from outrider.engine.async_engine import AsyncEngine, AsyncStream, WakeUps
from outrider.engine.engine import Engine
from patience import wait_until


def test_stream_that_was_refused_its_id_does_not_cancel_who_has_it(
    engine: Engine, runner: EngineRunner
) -> None:
    async def run() -> tuple[str | None, str | None]:
        streams = AsyncEngine(engine)
        runner.may_run.clear()
        first = await streams.start([1], SHORT, request_id="same")
        second = await streams.start([2], SHORT, request_id="same")
        await asyncio.sleep(0.05)
        second.abort()
        runner.may_run.set()
        deltas = [delta async for delta in first]
        return deltas[-1].finish_reason, deltas[-1].error

    assert asyncio.run(run()) == ("length", None)


def test_old_stream_does_not_cancel_a_new_request_with_its_id(engine: Engine, runner: EngineRunner) -> None:
    async def run() -> str | None:
        streams = AsyncEngine(engine)
        old = await streams.start([1], SHORT, request_id="same")
        while engine._loop.live or engine.num_steps == 0:
            await asyncio.sleep(0.005)
        runner.may_run.clear()
        new = await streams.start([2], SHORT, request_id="same")
        old.abort()  # it has ended, which it has not read
        runner.may_run.set()
        return [delta async for delta in new][-1].finish_reason

    assert asyncio.run(run()) == "length"


def test_forgotten_stream_frees_its_row(engine: Engine) -> None:
    async def run() -> None:
        async for _ in await AsyncEngine(engine).start([1], ENDLESS):
            break

    asyncio.run(run())
    gc.collect()
    wait_until(lambda: not engine._loop.live)


def test_submit_outside_of_an_event_loop_leaves_no_row_behind(engine: Engine) -> None:
    with pytest.raises(RuntimeError, match="event loop"):
        AsyncEngine(engine).submit(engine.validate([1], ENDLESS))
    gc.collect()
    wait_until(lambda: not engine._loop.live and engine._inbox.empty())


def test_loop_that_closes_under_a_stream_harms_no_other_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def begin() -> AsyncStream:
        return await AsyncEngine(engine).start([1], ENDLESS)

    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(begin())
    monkeypatch.setattr(loop, "is_closed", lambda: False)  # as if it closed just after one looked
    loop.close()
    assert end_of(submit(engine, [2], SHORT)).finish_reason == "length"
    stream.abort()
    stream.abort()
    wait_until(lambda: not engine._loop.live)


def test_abort_while_another_task_reads_ends_its_reading(engine: Engine) -> None:
    async def run() -> list[str | None]:
        stream = await AsyncEngine(engine).start([1], ENDLESS)

        async def read() -> list[str | None]:
            return [delta.finish_reason async for delta in stream]

        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        stream.abort()
        return await asyncio.wait_for(task, WAIT_S)

    assert asyncio.run(run())[-1] in (None, "cancelled")
    wait_until(lambda: not engine._loop.live)


def test_events_that_come_before_the_loop_runs_share_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> int:
        loop, num_calls = asyncio.get_running_loop(), 0
        wake_ups, events = WakeUps(loop), [asyncio.Event() for _ in range(3)]
        call = loop.call_soon_threadsafe

        def counted(callback: Callable[[], None]) -> asyncio.Handle:
            nonlocal num_calls
            num_calls += 1
            return call(callback)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        for _ in range(2):  # also after the loop has run
            for event in events:
                event.clear()
                wake_ups.wake(event)
            await asyncio.gather(*(asyncio.wait_for(event.wait(), WAIT_S) for event in events))
        return num_calls

    assert asyncio.run(run()) == 2


def test_closed_loop_is_no_error_and_keeps_no_events() -> None:
    loop = asyncio.new_event_loop()
    wake_ups = WakeUps(loop)
    loop.close()
    wake_ups.wake(asyncio.Event())
    assert not wake_ups._due
