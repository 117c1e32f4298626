"""Engines share the device by the time that they use. The clock is the test's own."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from outrider.engine.device_turns import DeviceTurns, EngineTurns, TurnTakingRunner
from patience import wait_until


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def step(clock: Clock, turns: EngineTurns, seconds: float) -> bool:
    has_changed = turns.take()
    clock.now += seconds
    turns.give_back()
    return has_changed


@pytest.mark.parametrize("seed", range(5))
def test_busy_engines_use_equal_times_whatever_their_steps_take(seed: int) -> None:
    dice, clock = random.Random(seed), Clock()
    device = DeviceTurns(clock)
    longest = [0.001, dice.uniform(0.001, 0.1), dice.uniform(0.001, 0.01)][: dice.choice([2, 3])]
    shares = [device.join() for _ in longest]
    is_over = threading.Event()

    def run(turns: EngineTurns, most_s: float, own: random.Random) -> None:
        turns.take()
        while not is_over.is_set():
            # The others are busy too: a turn ends only when all of them wait.
            wait_until(lambda: len(device.waiting) == len(shares) - 1 or is_over.is_set())
            clock.now += own.uniform(most_s / 2, most_s)
            with device.changed:  # this one waits too before the next one is chosen
                turns.give_back()
                turns.take()
        turns.give_back()

    threads = [
        threading.Thread(target=run, args=(share, most_s, random.Random(seed + i)))
        for i, (share, most_s) in enumerate(zip(shares, longest, strict=True))
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: clock.now > 2.0)
    is_over.set()
    for thread in threads:
        thread.join()
    used = [share.used_s for share in shares]
    assert max(used) - min(used) <= 2 * max(longest)
    assert sum(used) == pytest.approx(clock.now)


def test_pause_is_not_made_up_for() -> None:
    clock = Clock()
    device = DeviceTurns(clock)
    busy, rested = device.join(), device.join()
    for _ in range(100):
        step(clock, busy, 1.0)
    step(clock, rested, 1.0)
    assert rested.claim_s >= busy.claim_s - 1.0  # not 100 turns in a row
    assert (busy.used_s, rested.used_s) == (100.0, 1.0)


def test_engine_learns_that_another_one_stepped_in_between() -> None:
    clock = Clock()
    device = DeviceTurns(clock)
    one, other = device.join(), device.join()
    assert [step(clock, turns, 0.1) for turns in (one, one, other, one, one)] == [
        True,
        False,
        True,
        True,
        False,
    ]


def test_turn_that_is_not_held_is_not_given_back() -> None:
    clock = Clock()
    device = DeviceTurns(clock)
    one, other = device.join(), device.join()
    one.take()
    other.give_back()
    assert device.holder is one
    one.give_back()
    one.give_back()
    assert device.holder is None
    assert not one.is_contended


class CountingRunner:
    """Counts the steps in flight."""

    num_in_flight = 0

    def run(self, plan: Any) -> str:
        return "result"

    def launch(self, plan: Any) -> str:
        self.num_in_flight += 1
        return "launched"

    def finish(self, launched: Any) -> str:
        self.num_in_flight -= 1
        return "result"


def test_a_measurement_that_is_not_wanted_any_more_ends_without_a_turn() -> None:
    device, wanted = DeviceTurns(), [True]

    def check_wanted() -> None:
        if not wanted[0]:
            raise InterruptedError

    runner: Any = CountingRunner()
    taking = TurnTakingRunner(runner, device.join(), check_wanted)
    first, second = taking.launch(None), taking.launch(None)
    wanted[0] = False
    taking.launch(None)  # steps are in flight: they end first
    for launched in (first, second, "launched"):
        taking.finish(launched)
    assert (device.holder, runner.num_in_flight) == (None, 0)
    for begin in (taking.run, taking.launch):
        with pytest.raises(InterruptedError):
            begin(None)
    assert device.holder is None
