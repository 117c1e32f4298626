"""The watchdog over a real engine thread whose runner blocks, and over an event loop that stands still."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from test_engine import ENDLESS, SHORT, EngineRunner, end_of, parts, submit

from outrider.cli import watchdog as watchdog_module
from outrider.cli.watchdog import Watchdog, watch_loading
from outrider.cli.worker import HUNG, SHUTDOWN_TOO_LONG
from outrider.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.heartbeat import FIRST_FACTOR
from patience import PATIENCE_S, wait_until

TIMEOUT_S = 100.0  # of pretended time: the tests look as often as they like


class Panic(BaseException):
    pass


@pytest.fixture
def runner() -> EngineRunner:
    return EngineRunner()


@pytest.fixture
def engine(runner: EngineRunner) -> Iterator[Engine]:
    engine = Engine(EngineConfig(), lambda: parts(runner))
    yield engine
    runner.may_run.set()
    engine.close()


@pytest.fixture
def ends() -> list[int]:
    return []


@pytest.fixture
def watchdog(engine: Engine, ends: list[int]) -> Watchdog:
    return Watchdog(lambda: [engine], TIMEOUT_S, {}, ends.append)


def look(watchdog: Watchdog, seconds: float) -> None:
    watchdog.look(0.0)  # sees what the threads do
    watchdog.look(seconds)


def test_step_that_hangs_ends_the_process(
    engine: Engine,
    runner: EngineRunner,
    watchdog: Watchdog,
    ends: list[int],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert end_of(submit(engine, [1], SHORT)).finish_reason == "length"  # steps of both kinds are known now
    runner.may_run.clear()
    submit(engine, [1], ENDLESS)
    wait_until(lambda: engine.heartbeat.activity.startswith("prefill step"))
    look(watchdog, TIMEOUT_S - 1)
    assert ends == []
    watchdog.look(2.0)
    assert ends == [HUNG]
    assert "the engine hangs: prefill step of up to 1 tokens for 101 s (--step-timeout)" in caplog.text
    assert "in finish" in capfd.readouterr().err  # where it hangs


def test_clients_are_told_before_a_process_that_hangs_ends(
    engine: Engine, runner: EngineRunner, watchdog: Watchdog, ends: list[int]
) -> None:
    assert end_of(submit(engine, [1], SHORT)).finish_reason == "length"
    runner.may_run.clear()
    outbox = submit(engine, [1], ENDLESS)
    wait_until(lambda: engine.heartbeat.activity.startswith("prefill step"))
    told = []

    def tell(reason: str) -> None:
        told.append((reason, list(ends)))
        engine.abandon(reason)

    watchdog.on_hang = tell
    look(watchdog, TIMEOUT_S + 1)
    assert told == [("the engine hangs: prefill step of up to 1 tokens for 101 s", [])]
    assert end_of(outbox).finish_reason == "error"
    assert ends == [HUNG]


def test_a_lost_rank_is_a_fault(watchdog: Watchdog) -> None:
    assert watchdog.fault() is None
    watchdog.lost_rank = "rank 1 of this model is gone"
    assert watchdog.fault() == "rank 1 of this model is gone"


def test_first_step_may_take_longer(
    engine: Engine, runner: EngineRunner, watchdog: Watchdog, ends: list[int]
) -> None:
    runner.may_run.clear()
    submit(engine, [1], ENDLESS)
    wait_until(lambda: engine.heartbeat.activity.startswith("prefill step"))
    look(watchdog, TIMEOUT_S + 1)
    assert (ends, watchdog.fault()) == ([], None)
    assert str(Watchdog(lambda: [engine], 1e-9, {}).fault()).startswith("the engine hangs: prefill step of")
    watchdog.look(FIRST_FACTOR * TIMEOUT_S)
    assert ends == [HUNG]


def test_long_prompt_after_short_ones_may_take_longer(
    engine: Engine, runner: EngineRunner, watchdog: Watchdog, ends: list[int]
) -> None:
    """On a slow machine it takes more than 20 times as long as a prompt whose prefix is cached."""
    assert end_of(submit(engine, [1], SHORT)).finish_reason == "length"
    runner.may_run.clear()
    submit(engine, [1] * 100, ENDLESS)
    wait_until(lambda: engine.heartbeat.activity == "prefill step of up to 128 tokens")
    look(watchdog, TIMEOUT_S + 1)
    assert (ends, watchdog.fault()) == ([], None)


def test_engine_that_works_or_waits_goes_on(engine: Engine, watchdog: Watchdog, ends: list[int]) -> None:
    look(watchdog, 1e9)
    outbox = submit(engine, [1], ENDLESS)
    for _ in range(5):
        num_steps = engine.num_steps
        wait_until(lambda n=num_steps: engine.num_steps > n + 1)  # type: ignore[misc]
        watchdog.look(1e9)
    engine.close()
    assert end_of(outbox).finish_reason == "cancelled"
    assert (ends, watchdog.fault()) == ([], None)


def test_event_loop_that_stands_still_ends_the_process(watchdog: Watchdog, ends: list[int]) -> None:
    watchdog.event_loop.enter("event loop")
    watchdog.event_loop.enter("event loop")
    look(watchdog, TIMEOUT_S + 1)
    assert ends == [HUNG]


def test_shutdown_that_takes_too_long_ends_the_process(watchdog: Watchdog, ends: list[int]) -> None:
    look(watchdog, 1e9)
    watchdog.end_within(10.0)
    watchdog.look(9.0)
    assert ends == []
    watchdog.look(2.0)
    assert ends == [SHUTDOWN_TOO_LONG]


@pytest.mark.parametrize(("is_ready", "expected"), [(False, [HUNG]), (True, [])])
def test_model_that_is_not_loaded_in_time_ends_the_process(
    is_ready: bool, expected: list[int], ends: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    ready = threading.Event()
    if is_ready:
        ready.set()
    watch_loading(ready, 0.05, ends.append)
    wait_until(lambda: not _is_running("outrider-load-watch"))
    assert ends == expected
    assert ("not loaded within 0.05 s (--load-timeout)" in caplog.text) != is_ready
    watch_loading(threading.Event(), 0.0, ends.append)
    assert not _is_running("outrider-load-watch")  # 0: no limit


def _is_running(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def test_log_that_nobody_reads_does_not_keep_the_process(
    watchdog: Watchdog, ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(watchdog_module, "REPORT_S", 0.01)
    monkeypatch.setattr(watchdog_module, "_report", lambda _: released.wait(PATIENCE_S))
    watchdog.end_within(0.0)
    watchdog.look(1.0)
    assert ends == [SHUTDOWN_TOO_LONG]
    released.set()


def test_panic_ends_every_request_and_is_reported_once(
    engine: Engine, runner: EngineRunner, watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[str | None] = []
    watchdog.on_engine_failure = lambda: reports.append(watchdog.fault())
    runner.may_run.clear()
    outboxes = [submit(engine, [i], ENDLESS) for i in range(3)]

    def panic(*_: object) -> None:
        raise Panic("index out of bounds")

    monkeypatch.setattr(runner, "_raise_if_faulty", panic)
    watchdog.look(1.0)
    assert reports == []
    runner.may_run.set()
    assert {end_of(outbox).finish_reason for outbox in outboxes} == {"error"}
    engine.close()
    watchdog.look(1.0)
    watchdog.look(1.0)
    assert reports == ["the engine has failed"]
