"""A step from its plan to its commit, and the executor that launches and reads steps.

    scheduler.plan() -> InFlightStep -> executor.launch -> executor.finish -> scheduler.commit

One step is in flight, or two where the device outruns the host: then the second one is planned and launched
before the first one is read. The executor decides nothing; it measures how long each step took.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Steps
from dataclasses import dataclass, field

from outrider.engine.sequence import Sequence
from outrider.plan import LaunchedStep, RowPlan, StepPlan, StepResult, StepRunner
from outrider.speculate.costs import StepShape


@dataclass(eq=False)
class InFlightStep:
    """A planned step, then a launched step, then a step with its result."""

    plan: StepPlan
    rows: dict[int, tuple[Sequence, RowPlan]] = field(default_factory=dict)  # by sequence id
    is_decode_only: bool = False  # one batch, whose rows all decode
    cost_shape: StepShape | None = None  # the cost-table entry that the step's time is evidence for

    launched: LaunchedStep | None = None
    launched_s: float = 0.0
    host_s: float | None = None  # from the last read to this launch; None: something else was going on
    is_typical: bool = True  # it ran as planned, and the host traced no pass meanwhile

    result: StepResult | None = None
    seconds: float | None = None  # from the last read to this one, with the host's work in between


class StepExecutor:
    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._last_read_s: float | None = None  # None: the thread did something else since the last read

    def launch(self, step: InFlightStep, in_front: Steps[InFlightStep] = ()) -> None:
        """Hand a step to the device. `in_front` are the steps that were launched and not read yet."""
        step.launched_s = time.perf_counter()
        step.launched = self._runner.launch(step.plan, in_front[-1].launched if in_front else None)
        step.is_typical = step.launched.is_as_planned
        if not in_front and self._last_read_s is not None:
            step.host_s = step.launched_s - self._last_read_s
        if step.launched.is_first_trace:
            for other in (*in_front, step):
                other.is_typical = False

    def finish(self, step: InFlightStep) -> StepResult:
        """Wait for the oldest step in flight and read it."""
        step.result = self._runner.finish(step.launched)
        began_s = step.launched_s if self._last_read_s is None else self._last_read_s
        self._last_read_s = time.perf_counter()
        step.seconds = self._last_read_s - began_s
        return step.result

    def forget_last_read(self) -> None:
        """The thread does something that is not part of a step: it waits, or encodes an image."""
        self._last_read_s = None
