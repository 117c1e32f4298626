"""Steps that were launched and are not yet read: one, or two where the device outruns the host.

Knows a runner's `launch` and `finish`, and how long each step took; decides nothing.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.plan import StepPlan, StepResult


class UnderWay(Protocol):
    """What a runner gives for a step that it has launched."""

    @property
    def is_traced(self) -> bool: ...

    @property
    def is_whole(self) -> bool: ...


class Launches(Protocol):
    """What of a runner is needed."""

    def launch(self, plan: StepPlan, after: Any = None) -> UnderWay: ...

    def finish(self, launched: Any) -> StepResult: ...


@dataclass(frozen=True)
class Landed:
    """A step that was read."""

    plan: StepPlan
    result: StepResult
    seconds: float  # since the one before it was read: with what the host had to do in between
    is_typical: bool  # it ran as it was planned, and the host had no passes to trace meanwhile
    host_s: float | None = None  # of that, before it was launched; None: it was while another was under way

    @property
    def own_s(self) -> float | None:
        """How long such a step takes; None where its time does not say."""
        return self.seconds if self.is_typical else None


@dataclass
class _Flying:
    plan: StepPlan
    launched: UnderWay  # what the runner needs to finish it
    launched_s: float
    is_typical: bool
    host_s: float | None


class Flights:
    def __init__(self, runner: Launches) -> None:
        self._runner = runner
        self._flying: deque[_Flying] = deque()
        self._last_read_s: float | None = None  # None: something else was done since

    def __len__(self) -> int:
        return len(self._flying)

    def launch(self, plan: StepPlan) -> None:
        """A step that follows goes after the last one launched."""
        after = self._flying[-1].launched if self._flying else None
        launched_s = time.perf_counter()
        launched = self._runner.launch(plan, after)
        host_s = None
        if after is None and self._last_read_s is not None:
            host_s = launched_s - self._last_read_s
        self._flying.append(_Flying(plan, launched, launched_s, launched.is_whole, host_s))
        for flying in self._flying:
            flying.is_typical &= not launched.is_traced

    def land(self) -> Landed:
        """Wait for the oldest one and read it. One that fails is still there: see `drop`."""
        oldest = self._flying[0]
        result = self._runner.finish(oldest.launched)
        self._flying.popleft()
        began_s = oldest.launched_s if self._last_read_s is None else self._last_read_s
        self._last_read_s = time.perf_counter()
        seconds = self._last_read_s - began_s
        return Landed(oldest.plan, result, seconds, oldest.is_typical, oldest.host_s)

    def pause(self) -> None:
        """Something that is not part of any step is done now: waiting, encoding a picture."""
        self._last_read_s = None

    def drop(self) -> None:
        """Forget them: their cells are lost."""
        self._flying.clear()
        self.pause()
