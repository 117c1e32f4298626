"""Steps in flight: whose time tells what a step costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from outrider.engine import in_flight
from outrider.engine.in_flight import InFlightStep, StepExecutor
from outrider.plan import StepPlan, StepResult


@dataclass(frozen=True)
class Launched:
    is_first_trace: bool
    is_as_planned: bool = True


class TracingRunner:
    """Traces a pass for each plan of a capacity that it has not seen."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def launch(self, plan: StepPlan, previous: Any = None) -> Launched:
        is_new = plan.capacity not in self._seen
        self._seen.add(plan.capacity)
        return Launched(is_new)

    def finish(self, launched: Launched) -> StepResult:
        return StepResult(())


def new_step(capacity: int) -> InFlightStep:
    return InFlightStep(StepPlan(1, capacity, (), ()))


def run(executor: StepExecutor, step: InFlightStep) -> InFlightStep:
    executor.launch(step)
    executor.finish(step)
    return step


def test_tracing_makes_the_traced_step_and_the_step_in_front_of_it_untypical() -> None:
    executor: Any = StepExecutor(TracingRunner())  # type: ignore[arg-type]
    typical = []
    last = new_step(16)
    executor.launch(last)
    for capacity in (16, 32, 32, 32):
        following = new_step(capacity)
        executor.launch(following, [last])
        executor.finish(last)
        typical.append(last.is_typical)
        last = following
    assert typical == [False, False, False, True]


def test_a_steps_time_is_all_that_passes_from_one_read_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's work in between counts; waiting and image encoding do not."""
    now = [100.0]
    monkeypatch.setattr(in_flight.time, "perf_counter", lambda: now[0])

    class Slow(TracingRunner):
        def launch(self, plan: StepPlan, previous: Any = None) -> Launched:
            now[0] += 1
            return Launched(False)

        def finish(self, launched: Launched) -> StepResult:
            now[0] += 10
            return StepResult(())

    executor = StepExecutor(Slow())  # type: ignore[arg-type]
    times = []
    for between in (5, 7, None):
        times.append(run(executor, new_step(16)).seconds)
        now[0] += between or 1000
        if between is None:
            executor.forget_last_read()
    times.append(run(executor, new_step(16)).seconds)
    assert times == [11, 5 + 11, 7 + 11, 11]


def test_a_step_that_did_not_run_as_planned_is_untypical() -> None:
    class Smaller(TracingRunner):
        def launch(self, plan: StepPlan, previous: Any = None) -> Launched:
            return Launched(False, is_as_planned=plan.capacity > 16)

    executor = StepExecutor(Smaller())  # type: ignore[arg-type]
    assert [run(executor, new_step(capacity)).is_typical for capacity in (16, 32)] == [False, True]
