"""A step from its plan to its commit: planned by the scheduler, launched and read by `StepExecutor`.

Runs on the engine thread. Must not know which requests are live, nor what the rows of a step gain by it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Steps
from dataclasses import dataclass, field

from outrider.engine.heartbeat import Heartbeat, sized
from outrider.engine.prompt_pacing import PromptWork
from outrider.engine.sequence import Sequence
from outrider.plan import LaunchedStep, RowPlan, StepPlan, StepResult, StepRunner
from outrider.speculate.costs import StepShape


@dataclass(eq=False)
class InFlightStep:
    """A step from its plan to its commit: planned, then launched, then with its result."""

    plan: StepPlan
    rows: dict[int, tuple[Sequence, RowPlan]] = field(default_factory=dict)  # by sequence id
    is_decode_only: bool = False  # one batch, whose rows all decode
    cost_shape: StepShape | None = None  # the cost-table entry that the step's time is evidence for
    prompt_work: PromptWork | None = None  # its prompt chunks

    launched: LaunchedStep | None = None
    launched_s: float = 0.0
    host_s: float | None = None  # from the last read to this launch; None: something else was going on
    is_typical: bool = True  # it ran as planned, and the host traced no pass meanwhile

    result: StepResult | None = None
    seconds: float | None = None  # from the last read to this one, with the host's work in between


class StepExecutor:
    """Launches and reads steps, and measures how long each step took."""

    def __init__(self, runner: StepRunner, heartbeat: Heartbeat | None = None) -> None:
        self._runner = runner
        self._heartbeat = heartbeat or Heartbeat()
        self._last_read_s: float | None = None  # None: the thread did something else since the last read

    def launch(self, step: InFlightStep, in_front: Steps[InFlightStep] = ()) -> None:
        """Hand a step to the device. `in_front` are the steps that were launched and not read yet."""
        self._heartbeat.enter(
            "decode step" if step.is_decode_only else sized("prefill step", step.plan.num_tokens)
        )
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
        self._heartbeat.enter("commit")
        return step.result

    def forget_last_read(self) -> None:
        """The thread does something that is not part of a step: it waits, or encodes an image."""
        self._last_read_s = None
