"""Steps under way: whose time tells what a step costs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from outrider.engine import in_flight as flights_module
from outrider.engine.in_flight import Flights
from outrider.plan import StepPlan, StepResult


@dataclass(frozen=True)
class Launched:
    is_traced: bool
    is_whole: bool = True


class TracingRunner:
    """Traces a pass for each plan of a capacity that it has not seen."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def launch(self, plan: StepPlan, after: Launched | None = None) -> Launched:
        is_new = plan.capacity not in self._seen
        self._seen.add(plan.capacity)
        return Launched(is_new)

    def finish(self, launched: Launched) -> StepResult:
        return StepResult(())


def plan(capacity: int) -> StepPlan:
    return StepPlan(1, capacity, (), ())


def test_a_step_is_held_up_by_the_tracing_of_its_own_pass_and_of_the_one_launched_after_it() -> None:
    flights = Flights(TracingRunner())
    typical = []
    flights.launch(plan(16))
    for capacity in (16, 32, 32, 32):
        flights.launch(plan(capacity))
        typical.append(flights.land().is_typical)
    assert typical == [False, False, False, True]


def test_a_steps_time_is_all_that_passes_from_one_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what the host does in between; but not what it waits for, or does for pictures."""
    now = [100.0]
    monkeypatch.setattr(flights_module.time, "perf_counter", lambda: now[0])

    class Slow(TracingRunner):
        def launch(self, plan: StepPlan, after: Launched | None = None) -> Launched:
            now[0] += 1
            return Launched(False)

        def finish(self, launched: Launched) -> StepResult:
            now[0] += 10
            return StepResult(())

    flights = Flights(Slow())
    times = []
    for between in (5, 7, None):
        flights.launch(plan(16))
        times.append(flights.land().seconds)
        now[0] += between or 1000
        if between is None:
            flights.pause()
    flights.launch(plan(16))
    times.append(flights.land().seconds)
    assert times == [11, 5 + 11, 7 + 11, 11]


def test_a_step_that_was_not_run_as_planned_tells_nothing() -> None:
    class Smaller(TracingRunner):
        def launch(self, plan: StepPlan, after: Launched | None = None) -> Launched:
            return Launched(False, is_whole=plan.capacity > 16)

    flights = Flights(Smaller())
    times = []
    for capacity in (16, 32):
        flights.launch(plan(capacity))
        times.append(flights.land().own_s)
    assert times[0] is None
    assert times[1] is not None
