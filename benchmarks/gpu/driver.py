"""Drives a scheduler and a runner as the engine does, and says where the host's time goes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from outrider.engine.scheduler import Scheduler
from outrider.step.runner import Runner


@dataclass
class Spent:
    """Seconds on the host, over all steps so far."""

    plan_s: float = 0.0
    run_s: float = 0.0  # handing steps over to the device, waiting for it, reading
    commit_s: float = 0.0


class Driver:
    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self.spent = Spent()

    def step(self) -> None:
        """One step, from its plan to its commit."""
        started = time.perf_counter()
        plan = self._scheduler.plan()
        assert plan is not None
        planned = time.perf_counter()
        result = self._runner.run(plan)
        ran = time.perf_counter()
        self._scheduler.commit(result, ran - planned)
        self.spent.plan_s += planned - started
        self.spent.run_s += ran - planned
        self.spent.commit_s += time.perf_counter() - ran

    def run_out(self) -> None:
        """Steps until no row is left."""
        while not self._scheduler.is_idle:
            self.step()
        self.leave()

    def leave(self) -> None:
        """Drop all rows and cells."""
        self._runner.reset()
