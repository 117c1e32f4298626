"""Runs a planned step to its commit, as the engine does."""

from __future__ import annotations

from typing import Any

from outrider.engine.in_flight import InFlightStep
from outrider.engine.scheduler import Scheduler
from outrider.engine.sequence import Delta


def run_step(
    scheduler: Scheduler, runner: Any, step: InFlightStep, seconds: float | None = None
) -> list[Delta]:
    step.result, step.seconds = runner.run(step.plan), seconds
    return scheduler.commit(step)
