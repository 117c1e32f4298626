"""Whose turn it is on the device: the engines of several models share it by the time that they use.

    used_s   A  3.0        B  3.4                A goes next, although B may have waited longer
    A steps for 0.2 s   -> A  3.2   B  3.4       A again
    A steps for 0.3 s   -> A  3.5   B  3.4       now B

The engine that has used the least time goes first. One that comes back after a pause starts level with the
engine that has the turn, so that it cannot claim the time of its pause. A turn is one step; an engine without
work holds none. With a single engine a turn costs two locks: a few microseconds.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from outrider.plan import StepPlan, StepResult, StepRunner


class DeviceTurns:
    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self.now_s = now_s
        self.changed = threading.Condition()
        self.holder: EngineTurns | None = None
        self.last_holder: EngineTurns | None = None
        self.waiting: dict[EngineTurns, None] = {}  # in the order in which they began to wait
        self.sequence_ids = itertools.count()  # shared, so that rows of different models can be told apart
        self.level_s = 0.0  # `claim_s` of the engine that had the latest turn, when that turn began

    def join(self) -> EngineTurns:
        """The turns of one more engine."""
        return EngineTurns(self)


class EngineTurns:
    """The turns of one engine, for its thread."""

    def __init__(self, device: DeviceTurns) -> None:
        self.used_s = 0.0  # of all its turns
        self.sequence_ids = device.sequence_ids
        self.claim_s = 0.0  # orders the engines that wait: time used, and the time of pauses made up for
        self._device = device
        self._since_s = 0.0

    def take(self, before_waiting: Callable[[], None] = lambda: None) -> bool:
        """Wait for this engine's turn. True if another engine had a turn since its last one."""
        device = self._device
        with device.changed:
            self.claim_s = max(self.claim_s, device.level_s)
            if device.holder is not None or device.waiting:
                device.waiting[self] = None
                before_waiting()
                device.changed.wait_for(self._is_next)
                del device.waiting[self]
            device.holder = self
            device.level_s = self.claim_s
            has_changed = device.last_holder is not self
            device.last_holder = self
            self._since_s = device.now_s()
        return has_changed

    def give_back(self) -> None:
        """No effect on an engine that does not have the turn."""
        device = self._device
        with device.changed:
            if device.holder is not self:
                return
            seconds = device.now_s() - self._since_s
            self.used_s += seconds
            self.claim_s += seconds
            device.holder = None
            if device.waiting:
                device.changed.notify_all()

    @contextmanager
    def held(self) -> Iterator[None]:
        """A turn for as long as the body takes; the current one, if this engine has it."""
        if self._device.holder is self:
            yield
            return
        self.take()
        try:
            yield
        finally:
            self.give_back()

    def clock(self) -> float:
        """Seconds of this engine's turns. Time in which it waits for one is not counted."""
        device = self._device
        running_s = device.now_s() - self._since_s if device.holder is self else 0.0
        return self.used_s + running_s

    @property
    def is_contended(self) -> bool:
        """True while another engine waits for its turn."""
        return bool(self._device.waiting)

    def _is_next(self) -> bool:
        device = self._device
        return device.holder is None and min(device.waiting, key=lambda one: one.claim_s) is self


class TurnTakingRunner:
    """A runner whose passes take turns with other models' steps.

    For costs that are measured beside other models: `EngineTurns.clock` counts the own time only.
    """

    def __init__(
        self, runner: StepRunner, turns: EngineTurns, check_wanted: Callable[[], None] = lambda: None
    ) -> None:
        """`check_wanted`: called before a turn; an exception ends the measurement."""
        self._runner = runner
        self._turns = turns
        self._check_wanted = check_wanted
        self._num_in_flight = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, plan: StepPlan) -> StepResult:
        self._check_wanted()
        with self._turns.held():
            return self._runner.run(plan)

    def launch(self, plan: StepPlan, *args: Any) -> Any:
        if self._num_in_flight == 0:
            self._check_wanted()
            self._turns.take()
        self._num_in_flight += 1
        return self._runner.launch(plan, *args)

    def finish(self, launched: Any) -> StepResult:
        try:
            return self._runner.finish(launched)
        finally:
            self._num_in_flight -= 1
            if self._num_in_flight == 0:
                self._turns.give_back()
