"""Drives a scheduler and a runner as the engine does, and says where the host's time goes."""

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
    launch_s: float = 0.0  # handing steps over to the device
    read_s: float = 0.0  # waiting for it, and reading
    commit_s: float = 0.0


class Driver:
    """`ahead`: launch the step that follows before the one under way is read, wherever that can be."""

    def __init__(self, scheduler: Scheduler, runner: Runner, ahead: bool) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._ahead = ahead
        self._executor = StepExecutor(runner)
        self.num_ahead = 0
        self.spent = Spent()

    def step(self) -> None:
        """One step is read and committed."""
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
        """Steps until no row is left."""
        while not self._scheduler.is_idle:
            self.step()
        self.leave()

    def leave(self) -> None:
        """Wait for what is under way, and drop all rows and cells."""
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
