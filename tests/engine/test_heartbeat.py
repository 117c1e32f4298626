"""The heartbeat: how long an activity may take follows from how long it took before."""

from __future__ import annotations

import math

import pytest

from outrider.engine.heartbeat import FIRST_FACTOR, IDLE, SLOW_FACTOR, Heartbeat, sized

TIMEOUT_S = 60.0


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def heartbeat(clock: Clock) -> Heartbeat:
    return Heartbeat(clock)


def spend(heartbeat: Heartbeat, clock: Clock, name: str, seconds: float) -> None:
    heartbeat.enter(name)
    clock.now_s += seconds


def test_waiting_for_work_has_no_limit_and_no_age(heartbeat: Heartbeat, clock: Clock) -> None:
    spend(heartbeat, clock, IDLE, 1e6)
    assert (heartbeat.limit_s(TIMEOUT_S), heartbeat.age_s) == (math.inf, 0)


def test_first_time_of_an_activity_may_take_longer(heartbeat: Heartbeat, clock: Clock) -> None:
    spend(heartbeat, clock, "step", 4.0)
    assert heartbeat.age_s == 4.0
    assert heartbeat.limit_s(TIMEOUT_S) == FIRST_FACTOR * TIMEOUT_S
    spend(heartbeat, clock, "commit", 0.0)
    spend(heartbeat, clock, "step", 0.0)
    assert heartbeat.limit_s(TIMEOUT_S) == SLOW_FACTOR * 4.0


def test_quick_activities_get_the_timeout(heartbeat: Heartbeat, clock: Clock) -> None:
    for _ in range(3):
        spend(heartbeat, clock, "step", 0.01)
    assert heartbeat.limit_s(TIMEOUT_S) == TIMEOUT_S
    assert heartbeat.limit_s(0) == math.inf


@pytest.mark.parametrize(
    ("slowest_s", "timeout_s", "limit_s"), [(1.6, 20.0, 32.0), (1.6, 60.0, 60.0), (10.0, 60.0, 200.0)]
)
def test_hung_step_is_noticed_soon_also_under_load(
    heartbeat: Heartbeat, clock: Clock, slowest_s: float, timeout_s: float, limit_s: float
) -> None:
    spend(heartbeat, clock, "step", slowest_s)
    spend(heartbeat, clock, "step", 0.0)
    assert heartbeat.limit_s(timeout_s) == pytest.approx(limit_s)


def test_a_slow_time_is_forgotten_slowly(heartbeat: Heartbeat, clock: Clock) -> None:
    spend(heartbeat, clock, "step", 30.0)
    spend(heartbeat, clock, "step", 0.01)
    limits = []
    for _ in range(500):
        spend(heartbeat, clock, "step", 0.01)
        limits.append(heartbeat.limit_s(TIMEOUT_S))
    assert limits[10] > SLOW_FACTOR * 20.0
    assert limits[-1] == TIMEOUT_S


@pytest.mark.parametrize(("num_tokens", "size"), [(0, 1), (1, 1), (2, 2), (3, 4), (512, 512), (513, 1024)])
def test_sizes_are_powers_of_two(num_tokens: int, size: int) -> None:
    assert sized("step", num_tokens) == f"step of up to {size} tokens"
