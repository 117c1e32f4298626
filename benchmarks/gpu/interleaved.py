"""Compares loops whose rows decode side by side: a few steps of one, then of the next, many times.

A step on a GPU is mostly the host's work, and the host flips between two speeds that differ by a factor of
1.6, at any time and for seconds (docs/LOG.md, "The host has two speeds"). Whole runs of each loop would
compare these speeds; a few steps of each in turn meet the same one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from benchmarks.gpu.driver import Driver
from benchmarks.gpu.loop import Load, Loop, until_decoding
from outrider.engine.sequence import Sequence as Row
from outrider.request import DraftDepth
from outrider.speculate.controller import DepthController

UNTIMED_STEPS = 2  # after each change: the first of them were launched before it


@dataclass
class Arm:
    """One loop of a comparison."""

    loop: Loop
    within: Callable[[], AbstractContextManager[object]] = nullcontext  # entered around its steps
    steps_s: list[list[float]] = field(default_factory=list)  # of each round
    rows: list[Row] = field(default_factory=list)

    def median_s(self, number: int) -> float:
        return statistics.median(self.steps_s[number])

    @property
    def step_ms(self) -> float:
        return 1e3 * statistics.median(map(statistics.median, self.steps_s))

    @property
    def fast_ms(self) -> float:
        """The fastest quarter of all steps takes at most this."""
        return 1e3 * statistics.quantiles([s for each in self.steps_s for s in each], n=4)[0]


@dataclass(frozen=True)
class Ratio:
    """Of the speeds of two arms, over all rounds."""

    median: float
    low: float  # a quarter of the rounds is lower
    high: float

    @property
    def text(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


def compare(
    arms: Mapping[str, Arm],
    policy: DraftDepth,
    load: Load,
    controller: DepthController,
    rounds: int,
    steps: int = 6,
) -> None:
    """Each round adds `steps` timed steps to every arm. `load.steps` is not used."""
    total = Load(
        load.rows,
        load.num_prompt,
        (rounds + 1) * (steps + UNTIMED_STEPS),
        load.seconds,
        load.temperature,
        load.longest_prompt,
    )
    drivers: dict[str, Driver] = {}
    try:
        for name, arm in arms.items():
            with arm.within():
                drivers[name], arm.rows = arm.loop.planned(policy, total, controller)
                until_decoding(drivers[name], arm.rows)
        for number in range(-1, rounds):  # the first round is not counted
            for name in list(arms) if number % 2 else list(reversed(arms)):
                with arms[name].within():
                    found = _timed(drivers[name], steps)
                if number >= 0:
                    arms[name].steps_s.append(found)
    finally:
        for driver in drivers.values():
            driver.leave()


def _timed(driver: Driver, steps: int) -> list[float]:
    for _ in range(UNTIMED_STEPS):
        driver.step()
    found = []
    for _ in range(steps):
        began = time.perf_counter()
        driver.step()
        found.append(time.perf_counter() - began)
    return found


def speed_ratio(arm: Arm, base: Arm) -> Ratio:
    """How fast `arm` is, relative to `base`: medians of the same round are compared."""
    found = [base.median_s(number) / arm.median_s(number) for number in range(len(arm.steps_s))]
    if len(found) < 2:
        return Ratio(found[0], found[0], found[0])
    low, middle, high = statistics.quantiles(found, n=4)
    return Ratio(middle, low, high)
