"""The engine thread on a runner without a model: whatever happens, every request gets an end."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fake_runner import VOCAB_SIZE, FakeLaunched, FakeRunner, true_next
from scheduler_harness import FakeText

from outrider.config import EngineConfig, InvalidConfig
from outrider.engine import engine as engine_module
from outrider.engine.engine import AsyncEngine, AsyncStream, Engine, EngineStopped
from outrider.engine.loop import Outbox
from outrider.engine.parts import EngineParts
from outrider.engine.sequence import Delta
from outrider.engine.validation import ModelFacts
from outrider.grammar.compiler import GrammarCompiler
from outrider.plan import CacheGeometry, StepPlan, StepResult
from outrider.request import Grammar, InvalidRequest, SamplingParams
from patience import PATIENCE_S, wait_until

WAIT_S = PATIENCE_S
GEOMETRY = CacheGeometry(bytes_per_cell=1, capacity_step=16)
SHORT = SamplingParams(max_tokens=4, temperature=0)
ENDLESS = SamplingParams(max_tokens=None, temperature=0)


class EngineRunner(FakeRunner):
    """The fake runner as an engine sees it; steps can be held up and resets made to raise."""

    def __init__(self) -> None:
        super().__init__(GEOMETRY)
        self.may_run = threading.Event()
        self.may_run.set()
        self.breaks_on_reset = False
        self.num_under_way = 0

    def geometry(self, capacity_step: int) -> CacheGeometry:
        return GEOMETRY

    def launch(self, plan: StepPlan, after: FakeLaunched | None = None) -> FakeLaunched:
        self.num_under_way += 1
        return super().launch(plan, after)

    def finish(self, launched: FakeLaunched) -> StepResult:
        assert self.may_run.wait(WAIT_S)
        self.num_under_way -= 1
        time.sleep(0.001)
        return super().finish(launched)

    def reset(self) -> None:
        if self.breaks_on_reset:
            raise RuntimeError("the device is gone")
        super().reset()


def no_tokenizer() -> Any:
    raise AssertionError("no grammar is asked for")


def parts(runner: EngineRunner, budget_bytes: int = 10**9, overlaps_steps: bool = False) -> EngineParts:
    facts = ModelFacts("fake", VOCAB_SIZE, 100_000, frozenset(), "none")
    return EngineParts(
        runner,
        facts,
        budget_bytes,
        lambda request: FakeText(),
        GrammarCompiler(no_tokenizer),
        overlaps_steps=overlaps_steps,
    )


@pytest.fixture
def runner() -> EngineRunner:
    return EngineRunner()


@pytest.fixture(params=[False, True], ids=["", "ahead"])
def engine(runner: EngineRunner, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(EngineConfig(), lambda: parts(runner, overlaps_steps=request.param))
    yield engine
    runner.may_run.set()
    engine.close()


def submit(engine: Engine, prompt_ids: list[int], params: SamplingParams) -> Outbox:
    return engine.submit(engine.validate(prompt_ids, params))


def end_of(outbox: Outbox) -> Delta:
    """All that came, up to the end."""
    whole = outbox.take(WAIT_S)
    assert whole is not None, "no end came"
    while whole.finish_reason is None:
        more = outbox.take(WAIT_S)
        assert more is not None, "no end came"
        whole = whole.merged(more)
    return whole


# -- waiting ---------------------------------------------------------------------------------------------


def test_an_engine_without_work_gives_memory_back_once(
    runner: EngineRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "IDLE_S", 0.01)
    released: list[int] = []
    own = replace(parts(runner), release_buffers=lambda: released.append(runner.num_under_way))
    engine = Engine(EngineConfig(), lambda: own)
    try:
        for num_before in range(3):
            wait_until(lambda num=num_before: len(released) == num + 1)
            time.sleep(0.05)
            assert len(released) == num_before + 1
            assert end_of(submit(engine, [1], SHORT)).finish_reason == "length"
    finally:
        engine.close()
    assert not any(released)


def test_an_engine_at_work_keeps_its_memory(runner: EngineRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "IDLE_S", 0.01)
    released: list[int] = []
    own = replace(parts(runner), release_buffers=lambda: released.append(1))
    engine = Engine(EngineConfig(), lambda: own)
    try:
        outbox = submit(engine, [1], ENDLESS)
        wait_until(lambda: runner.num_under_way > 0)
        num_released = len(released)
        for _ in range(20):
            assert outbox.take(WAIT_S) is not None
            time.sleep(0.02)
        assert len(released) == num_released
    finally:
        engine.close()


# -- shutting down ---------------------------------------------------------------------------------------


def test_closing_ends_everyone_and_closing_twice_is_harmless(engine: Engine, runner: EngineRunner) -> None:
    outboxes = [submit(engine, [1], ENDLESS) for _ in range(40)]
    engine.close()
    engine.close()
    assert {end_of(outbox).finish_reason for outbox in outboxes} == {"cancelled"}
    with pytest.raises(EngineStopped):
        engine.validate([1], SHORT)
    engine.cancel("unknown")


def test_a_step_whose_rows_have_all_ended_may_fail(
    runner: EngineRunner, caplog: pytest.LogCaptureFixture
) -> None:
    """It was launched ahead; nobody waits for it."""
    engine = Engine(EngineConfig(), lambda: parts(runner, overlaps_steps=True))
    try:
        for _ in range(5):
            request = engine.validate([1], ENDLESS)
            outbox = engine.submit(request)
            scheduler, num_steps = engine._loop.scheduler, engine.num_steps
            wait_until(lambda n=num_steps: engine.num_steps > n + 3)  # type: ignore[misc]
            runner.faults = dict.fromkeys(range(20), lambda row: not engine._loop.live)
            engine.cancel(request.id)
            assert end_of(outbox).finish_reason == "cancelled"
            assert end_of(submit(engine, [1, 2], SHORT)).finish_reason == "length"
            runner.faults = {}
        assert "after its rows had ended" in caplog.text
        assert engine._loop.scheduler is scheduler
    finally:
        engine.close()


def test_closing_leaves_no_step_under_way(engine: Engine, runner: EngineRunner) -> None:
    outbox = submit(engine, [1], ENDLESS)
    wait_until(lambda: engine.num_steps > 3)
    engine.close()
    assert end_of(outbox).finish_reason == "cancelled"
    assert runner.num_under_way == 0


def test_submits_during_a_close_are_refused_or_get_their_end(engine: Engine) -> None:
    accepted: list[Outbox] = []

    def submit_until_refused() -> None:
        while True:
            try:
                request = engine.validate([1, 2], ENDLESS)
                outbox = engine.submit(request)
            except EngineStopped:
                return
            accepted.append(outbox)
            engine.cancel(request.id)

    threads = [threading.Thread(target=submit_until_refused) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: accepted)
    engine.close()
    for thread in threads:
        thread.join(WAIT_S)
    assert {end_of(outbox).finish_reason for outbox in accepted} == {"cancelled"}


def test_several_threads_may_close_at_once_while_a_step_runs(engine: Engine, runner: EngineRunner) -> None:
    runner.may_run.clear()
    outbox = submit(engine, [1], ENDLESS)
    threads = [threading.Thread(target=engine.close) for _ in range(3)]
    for thread in threads:
        thread.start()
    runner.may_run.set()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert end_of(outbox).finish_reason == "cancelled"


def test_interrupted_load_leaves_nothing_behind() -> None:
    loaded, may_load = threading.Event(), threading.Event()
    seen: list[weakref.ref[EngineRunner]] = []
    waiting = threading.get_ident()

    def build() -> EngineParts:
        signal.pthread_kill(waiting, signal.SIGINT)
        assert may_load.wait(WAIT_S)
        runner = EngineRunner()
        seen.append(weakref.ref(runner))
        loaded.set()
        return parts(runner)

    with pytest.raises(KeyboardInterrupt):
        Engine(EngineConfig(), build)
    may_load.set()
    assert loaded.wait(WAIT_S)
    wait_until(lambda: gc.collect() >= 0 and seen[0]() is None)


def test_engine_that_could_not_start_frees_what_it_loaded() -> None:
    seen: list[weakref.ref[EngineRunner]] = []

    def build() -> EngineParts:
        runner = EngineRunner()
        seen.append(weakref.ref(runner))
        return parts(runner, budget_bytes=1)

    with pytest.raises(InvalidConfig, match="budget") as caught:
        Engine(EngineConfig(), build)
    wait_until(lambda: gc.collect() >= 0 and seen[0]() is None)
    assert caught.value.__traceback__ is not None  # its frames are alive, and hold no weights


# -- faults ----------------------------------------------------------------------------------------------


class FaultyObserver:
    def on_step(self, *_: object) -> None:
        raise ZeroDivisionError("a rate of nothing")

    on_encode = on_embedding_cache = on_step


def test_observer_that_raises_costs_no_request_anything(runner: EngineRunner) -> None:
    engine = Engine(EngineConfig(), lambda: parts(runner), FaultyObserver())
    ends = [end_of(submit(engine, [i], SHORT)) for i in range(3)]
    engine.close()
    assert [(end.finish_reason, len(end.token_ids)) for end in ends] == [("length", 4)] * 3


@pytest.mark.parametrize("ahead", [False, True])
def test_observer_is_told_of_the_tokens_that_clients_get(runner: EngineRunner, ahead: bool) -> None:
    """And not of those of a row that ran once too often, since it was launched before it was seen to end."""
    seen = Counter[str]()

    class Counts:
        def on_step(self, plan: StepPlan, result: StepResult, *_: object) -> None:
            seen["tokens"] += sum(len(row.token_ids) for row in result.rows)
            seen["rows"] += sum(row.is_sampling for batch in plan.batches for row in batch)

    answer = [1]
    while len(answer) < 4 or answer[-1] in answer[:-1]:
        answer.append(true_next(answer))
    stops = SamplingParams(max_tokens=40, temperature=0, stop_token_ids=(answer[-1],))
    runner.may_run.clear()
    engine = Engine(EngineConfig(), lambda: parts(runner, overlaps_steps=ahead), Counts())  # type: ignore[arg-type]
    outboxes = [submit(engine, [1], stops), submit(engine, [2], replace(SHORT, max_tokens=30))]
    runner.may_run.set()
    ends = [end_of(outbox) for outbox in outboxes]
    engine.close()
    assert ends[0].finish_reason == "stop"
    assert seen["tokens"] == seen["rows"] == sum(len(end.token_ids) for end in ends)


def test_fault_in_the_books_ends_requests_with_an_error_and_the_engine_serves_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = engine._loop.scheduler
    monkeypatch.setattr(scheduler, "commit", lambda *_: 1 / 0)
    end = end_of(submit(engine, [1], SHORT))
    assert end.finish_reason == "error"
    assert "division" in (end.error or "")
    assert end_of(submit(engine, [1], SHORT)).finish_reason == "length"


def test_engine_that_cannot_go_on_ends_everyone_and_says_so(engine: Engine, runner: EngineRunner) -> None:
    runner.may_run.clear()
    outboxes = [submit(engine, [i], ENDLESS) for i in range(3)]
    runner.breaks_on_reset = runner.raises_next = True
    runner.may_run.set()
    ends = [end_of(outbox) for outbox in outboxes]
    assert {end.finish_reason for end in ends} == {"error"}
    engine.close()
    with pytest.raises(EngineStopped):
        engine.validate([1], SHORT)


def test_clearing_the_prefix_cache_of_an_engine_that_breaks_does_not_hang(
    engine: Engine, runner: EngineRunner
) -> None:
    runner.breaks_on_reset = True
    failures: list[Exception] = []

    def clear() -> None:
        try:
            engine.clear_prefix_cache()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=clear, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), "it waits for ever"
    assert "the device is gone" in str(failures[0])


def test_cancel_from_within_a_submit_does_not_hang(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the garbage collector runs there and finalises an abandoned stream."""
    put, cancelled = engine._inbox.put, []

    class Inbox:
        def put(self, command: Any) -> None:
            if not cancelled:
                cancelled.append(True)
                engine.cancel("abandoned")
            put(command)

        def __getattr__(self, name: str) -> Any:
            return getattr(inbox, name)

    inbox = engine._inbox
    monkeypatch.setattr(engine, "_inbox", Inbox())
    outboxes: list[Outbox] = []
    thread = threading.Thread(target=lambda: outboxes.append(submit(engine, [1], SHORT)), daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert outboxes, "the submit hangs"
    assert end_of(outboxes[0]).finish_reason == "length"


# -- ids and streams -------------------------------------------------------------------------------------


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


# -- validation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_marker_that_can_never_come_is_refused(engine: Engine, token_id: int) -> None:
    grammar = Grammar("regex", "a", after_ids=(token_id,))
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        engine.validate([1], SamplingParams(grammar=grammar))


def test_min_tokens_is_refused_with_a_grammar(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="min_tokens"):
        engine.validate([1], SamplingParams(grammar=Grammar("regex", "a"), min_tokens=3))


# -- waiting for a row -----------------------------------------------------------------------------------


def test_only_a_request_without_a_row_is_given_up(runner: EngineRunner) -> None:
    engine = Engine(EngineConfig(max_rows=1), lambda: parts(runner))
    try:
        running, waiting = engine.validate([1], ENDLESS), engine.validate([2], ENDLESS)
        outboxes = [engine.submit(running), engine.submit(waiting)]
        wait_until(lambda: engine.num_steps > 3)
        for request, outbox in zip((running, waiting), outboxes, strict=True):
            engine.cancel_if_waiting(request.id, outbox)
        end = end_of(outboxes[1])
        assert end.finish_reason == "queue_timeout"
        assert not end.token_ids
        num_steps = engine.num_steps
        wait_until(lambda: engine.num_steps > num_steps + 3)  # the other one goes on
        engine.cancel(running.id)
        assert end_of(outboxes[0]).finish_reason == "cancelled"
        engine.cancel_if_waiting(running.id, outboxes[0])
        assert end_of(submit(engine, [1], SHORT)).finish_reason == "length"
    finally:
        engine.close()
