"""What the holder of an API key has used of the key's limits. In memory: a restart forgets it.

    requests a minute    every request with a valid key, counted when it comes
    tokens a minute      prompt: counted when it is rendered; answer: when it ends or its client is gone
    rows, bytes of bodies and tokens of prompts at once    reserved before the server works on them

A request is accepted while a token is left, although its answer may need more. The excess is a debt: further
requests get a 429 until it is paid. So the average rate holds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextvars import ContextVar

from outrider.api.errors import ApiError
from outrider.api.keys import ApiKey, KeyLimits
from outrider.api.load import WORDS, Load

MINUTE_S = 60.0
RETRY_HELD_S = 2  # seconds after which a client may look for a free place; chosen by hand


def _limited(message: str, retry_s: int) -> ApiError:
    headers = {"Retry-After": str(retry_s)}
    return ApiError(429, message, code="rate_limit_exceeded", headers=headers, reason="key_limit")


class TokenBucket:
    """Fills steadily, up to the amount of one minute. Below zero is a debt."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._updated_s = clock()

    @property
    def level(self) -> float:
        now_s = self._clock()
        gained = (now_s - self._updated_s) * self.per_minute / MINUTE_S
        self._level, self._updated_s = min(self.per_minute, self._level + gained), now_s
        return self._level

    def take(self, amount: float) -> None:
        self._level = self.level - amount

    def wait_s(self, level: float) -> float:
        """Seconds until the bucket is filled to `level`."""
        return max(0.0, level - self.level) * MINUTE_S / self.per_minute


class KeyUsage:
    """The use of one key. Used from the event loop only."""

    def __init__(self, key: ApiKey, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = key.name
        self.limits = key.limits
        self.held = Load()  # by the requests that run or wait
        self._buckets = _buckets(key.limits, clock)
        self._clock = clock

    def set_limits(self, limits: KeyLimits) -> None:
        """The operator has changed them: the buckets are full again, what requests hold stays counted."""
        self.limits = limits
        self._buckets = _buckets(limits, self._clock)

    def hold(self, held: Load, more: Load) -> None:
        """Count what a request needs, beyond what it has `held` until now.

        Raises ApiError: 400 if the request alone is over a limit, 429 if it has to wait.
        """
        limit = self.limits.held
        if name := (held + more).excess(limit):
            raise ApiError(
                400,
                f"this request alone needs {getattr(held + more, name):,} {WORDS[name]}, and the key "
                f"{self.name!r} may have {getattr(limit, name):,} at once: ask for less",
            )
        if name := (self.held + more).excess(limit):
            raise _limited(
                f"the key {self.name!r} has {getattr(self.held, name):,} {WORDS[name]}, of at most "
                f"{getattr(limit, name):,}. Try again when an answer has ended.",
                RETRY_HELD_S,
            )
        self.held += more

    def release(self, held: Load) -> None:
        self.held -= held

    def count_request(self) -> None:
        """Raises ApiError 429 if the request is one too many."""
        self._check("requests")
        if (bucket := self._buckets.get("requests")) is not None:
            bucket.take(1)

    def check_tokens(self) -> None:
        """Raises ApiError 429 if no tokens are left."""
        self._check("tokens")

    def count_tokens(self, num_tokens: int) -> None:
        if (bucket := self._buckets.get("tokens")) is not None:
            bucket.take(num_tokens)

    def headers(self) -> dict[str, str]:
        """OpenAI's headers: the limit, what is left, and when all of it is there again."""
        found = {}
        for name, bucket in self._buckets.items():
            found[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
            found[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
            found[f"x-ratelimit-reset-{name}"] = f"{bucket.wait_s(bucket.per_minute):.3f}s"
        return found

    def _check(self, name: str) -> None:
        bucket = self._buckets.get(name)
        if bucket is None or bucket.level >= 1:
            return
        wait_s = math.ceil(bucket.wait_s(1))
        raise _limited(
            f"the key {self.name!r} has used its {bucket.per_minute:,} {name} a minute: "
            f"try again in {wait_s:,} s",
            wait_s,
        )


def _buckets(limits: KeyLimits, clock: Callable[[], float]) -> dict[str, TokenBucket]:
    given = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
    return {name: TokenBucket(limit, clock) for name, limit in given.items() if limit is not None}


class KeyUsages:
    """The use of every key, by name: a key that is replaced by another of the same name goes on as it was."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._usages: dict[str, KeyUsage] = {}
        self._clock = clock

    def of(self, key: ApiKey) -> KeyUsage:
        usage = self._usages.get(key.name)
        if usage is None:
            usage = self._usages[key.name] = KeyUsage(key, self._clock)
        if usage.limits != key.limits:
            usage.set_limits(key.limits)
        return usage


# Set for the time of one HTTP request. None: the server needs no key, or the route needs none.
current_usage: ContextVar[KeyUsage | None] = ContextVar("current_usage", default=None)
