"""Steps that were launched and are not yet read: one, or two where the device outruns the host.

Knows a runner's `launch` and `finish`, and how long each step took; decides nothing.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.plan import StepPlan, StepResult


class Launches(Protocol):
    """What of a runner is needed."""

    def launch(self, plan: StepPlan, after: Any = None) -> Any: ...

    def finish(self, launched: Any) -> StepResult: ...


@dataclass(frozen=True)
class Landed:
    """A step that was read."""

    plan: StepPlan
    result: StepResult
    seconds: float  # since it was launched, or since the one before it was read


class Flights:
    def __init__(self, runner: Launches) -> None:
        self._runner = runner
        self._flying: deque[tuple[StepPlan, Any, float]] = deque()  # with what the runner needs, and when
        self._last_read_s = 0.0

    def __len__(self) -> int:
        return len(self._flying)

    def launch(self, plan: StepPlan) -> None:
        """A step that follows goes after the last one launched."""
        after = self._flying[-1][1] if self._flying else None
        launched_s = time.perf_counter()
        self._flying.append((plan, self._runner.launch(plan, after), launched_s))

    def land(self) -> Landed:
        """Wait for the oldest one and read it. One that fails is still there: see `drop`."""
        plan, launched, launched_s = self._flying[0]
        result = self._runner.finish(launched)
        self._flying.popleft()
        before_s, self._last_read_s = self._last_read_s, time.perf_counter()
        return Landed(plan, result, self._last_read_s - max(launched_s, before_s))

    def drop(self) -> None:
        """Forget them: their cells are lost."""
        self._flying.clear()
