"""How tests deal with time: they wait for events, not for seconds.

A busy machine may be many times slower than an idle one. A test therefore waits until a condition holds, and
`PATIENCE_S` only ends a test that would wait for ever. `measures_time` marks a test that compares durations.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

PATIENCE_S = 240.0
IN_SOAK = "OUTRIDER_SOAK_SECONDS" in os.environ

_only_in_soak = pytest.mark.skipif(not IN_SOAK, reason="compares durations: runs under `make soak` only")


def measures_time(test: Any) -> Any:
    """Marks a test whose result depends on the speed and the load of the machine."""
    return pytest.mark.soak(_only_in_soak(test))


def in_test_or_soak(in_test: int, in_soak: int) -> int:
    """How many random cases a test runs: few under `make test`, all under `make soak`.

    The test needs `pytest.mark.soak`, without which `make soak` leaves it out.
    """
    return in_soak if IN_SOAK else in_test


def case_only_in_soak(*values: Any) -> Any:
    """A case of `pytest.mark.parametrize` that `make test` leaves out: similar ones run there."""
    marks = [pytest.mark.soak, pytest.mark.skipif(not IN_SOAK, reason="runs under `make soak` only")]
    return pytest.param(*values, marks=marks)


def wait_until(happened: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < give_up_s, "it never happened"
        time.sleep(0.005)


async def until(happened: Callable[[], object]) -> None:
    """`wait_until` for an event loop, which goes on meanwhile."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < give_up_s, "it never happened"
        await asyncio.sleep(0.001)


class Hurdle:
    """A point that a thread cannot pass until the test lets it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.gave_up = False
        self._may_pass = threading.Event()

    def stop(self) -> None:
        """Called by the thread."""
        self.reached.set()
        self.gave_up = self.gave_up or not self._may_pass.wait(PATIENCE_S)

    def open(self) -> None:
        self._may_pass.set()


async def goes_on_while_held(hurdle: Hurdle) -> None:
    """Returns if the event loop runs while a thread stands at the hurdle, and lets the thread go on.

    If the work at the hurdle runs on the event loop itself, the loop stands still and the hurdle stays closed
    until the work gives up.
    """
    await until(hurdle.reached.is_set)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not hurdle.gave_up, "the event loop stood still"
    hurdle.open()


@contextlib.contextmanager
def held_steps(engine: Any, num_free: int = 0) -> Iterator[Hurdle]:
    """The engine stands still before the step after the next `num_free` steps, until the hurdle is opened."""
    runner = engine._loop.parts.runner
    launch, hurdle, launched = runner.launch, Hurdle(), [0]

    def held(*step: Any) -> Any:
        launched[0] += 1
        if launched[0] > num_free:
            hurdle.stop()
        return launch(*step)

    runner.launch = held
    try:
        yield hurdle
    finally:
        hurdle.open()
        runner.launch = launch
