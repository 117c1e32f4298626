"""Drives a scheduler and a runner as the engine does, and measures where the host spends its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.engine.in_flight import InFlightStep, StepExecutor
from outrider.engine.scheduler import Scheduler
from outrider.step.runner import Runner


@dataclass
class Spent:
    """Seconds on the host, over all steps so far."""

    plan_s: float = 0.0
    launch_s: float = 0.0  # launching steps on the device
    read_s: float = 0.0  # waiting for results, and reading them
    commit_s: float = 0.0


class Driver:
    """`ahead`: steps overlap: where possible, the next step is launched before the last one is read."""

    def __init__(self, scheduler: Scheduler, runner: Runner, ahead: bool) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._ahead = ahead
        self._executor = StepExecutor(runner)
        self.num_ahead = 0
        self.spent = Spent()

    def step(self) -> None:
        """Reads and commits one step."""
        in_flight = self._scheduler.in_flight
        if not in_flight:
            planned = self._timed(self._scheduler.plan)
            assert planned is not None
            self._launch(planned, ())
        if self._ahead and (overlapped := self._timed(self._scheduler.plan_overlapped)) is not None:
            self._launch(overlapped, (in_flight[0],))
            self.num_ahead += 1
        started_s = time.perf_counter()
        self._executor.finish(in_flight[0])
        read_s = time.perf_counter()
        self._scheduler.commit(in_flight[0])
        self.spent.read_s += read_s - started_s
        self.spent.commit_s += time.perf_counter() - read_s

    def run_out(self) -> None:
        """Runs steps until no row is left."""
        while not self._scheduler.is_idle:
            self.step()
        self.leave()

    def go_idle(self) -> None:
        """What the engine does when no row is left: saves the last cells, then frees the row caches."""
        while in_flight := self._scheduler.in_flight:
            self._executor.finish(in_flight[0])
            self._scheduler.commit(in_flight[0])
        last_copies = self._scheduler.plan()
        if last_copies is not None:
            self._launch(last_copies, ())
            self._executor.finish(last_copies)
            self._scheduler.commit(last_copies)
        self._runner.reset()
        self._scheduler.check_integrity()

    def leave(self) -> None:
        """Waits for the steps in flight, and frees all rows and cache cells."""
        while self._scheduler.in_flight:
            self._executor.finish(self._scheduler.in_flight.popleft())
        self._runner.reset()

    def _timed(self, make: Callable[[], InFlightStep | None]) -> InFlightStep | None:
        started_s = time.perf_counter()
        step = make()
        self.spent.plan_s += time.perf_counter() - started_s
        return step

    def _launch(self, step: InFlightStep, in_front: Sequence[InFlightStep]) -> None:
        started_s = time.perf_counter()
        self._executor.launch(step, in_front)
        self.spent.launch_s += time.perf_counter() - started_s
