"""The heartbeat of a thread: what it does now, since when, and how long that may take. No locks.

One thread writes, any thread reads. A watchdog (cli/watchdog.py) ends the process if a limit is exceeded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

IDLE = "idle"  # the thread waits for work: no limit
# Factors chosen by hand: above what a busy machine causes, so that only a thread that hangs reaches them.
# The slowest of about the last 100 durations of an activity contains the usual load already: 20 is for a
# machine that becomes 20 times busier at once. With the default timeout of 60 s the factor matters above 3 s:
# a step of 10 s gives a limit of 200 s. (With a factor of 100, a hung step was noticed after 161 s.)
SLOW_FACTOR = 20  # limit, in times of the slowest recent duration of the same activity
FIRST_FACTOR = 10  # limit of an activity that has never ended yet (it may compile), in times of the timeout
FORGET = 0.99  # by which the slowest duration shrinks each time that the activity ends


def sized(name: str, num_tokens: int) -> str:
    """An activity whose time grows with its tokens: its limit follows from others of about its size only."""
    return f"{name} of up to {1 << max(0, num_tokens - 1).bit_length()} tokens"


class Heartbeat:
    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._slowest_s: dict[str, float] = {}
        # What the thread does, and since when. Replaced as a whole: a reader gets both parts of one beat.
        self.current = (IDLE, now_s())

    def enter(self, name: str) -> None:
        """The thread ends its current activity and begins this one. It may be the same one again."""
        now_s = self._now_s()
        ended, since_s = self.current
        took_s, slowest_s = now_s - since_s, FORGET * self._slowest_s.get(ended, 0.0)
        self._slowest_s[ended] = took_s if took_s > slowest_s else slowest_s
        self.current = (name, now_s)

    @property
    def activity(self) -> str:
        return self.current[0]

    @property
    def age_s(self) -> float:
        """Seconds since the last beat; 0 while the thread waits for work."""
        name, since_s = self.current
        return 0.0 if name == IDLE else max(0.0, self._now_s() - since_s)

    def limit_s(self, timeout_s: float) -> float:
        """How long the current activity may take, if `timeout_s` is the least limit. 0: there is none."""
        name = self.activity
        if name == IDLE or timeout_s == 0:
            return math.inf
        slowest_s = self._slowest_s.get(name)
        return FIRST_FACTOR * timeout_s if slowest_s is None else max(timeout_s, SLOW_FACTOR * slowest_s)
