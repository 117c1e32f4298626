"""The engine thread on a runner without a model: whatever happens, every request gets an end."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from engine_runner import ENDLESS, SHORT, WAIT_S, EngineRunner, end_of, parts, submit
from fake_runner import VOCAB_SIZE, true_next

from outrider.answer_form import Grammar
from outrider.config import EngineConfig, InvalidConfig
from outrider.engine import engine as engine_module
from outrider.engine.engine import Engine, EngineStopped
from outrider.engine.loop import Outbox
from outrider.engine.parts import EngineParts
from outrider.plan import StepPlan, StepResult
from outrider.request import InvalidRequest, SamplingParams
from patience import wait_until

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
