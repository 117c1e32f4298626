"""What requests hold until their answers end."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Load:
    """What one request holds, or several together."""

    num_requests: int = 0  # of the engine: a request for n answers counts n times
    num_bytes: int = 0  # of bodies
    num_tokens: int = 0  # of prompts: a prompt with n answers counts n times

    def __add__(self, other: Load) -> Load:
        return Load(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Load)))

    def __sub__(self, other: Load) -> Load:
        return Load(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(Load)))

    def excess(self, limit: LoadLimit) -> str | None:
        """The name of the first field that is over its limit."""
        limited = ((name, getattr(limit, name)) for name in WORDS)
        return next((name for name, most in limited if most is not None and getattr(self, name) > most), None)


@dataclass(frozen=True)
class LoadLimit:
    """The most of each field of Load. None: no limit."""

    num_requests: int | None = None
    num_bytes: int | None = None
    num_tokens: int | None = None


# What each field of Load counts.
WORDS = {
    "num_requests": "requests that run or wait",
    "num_bytes": "bytes of request bodies",
    "num_tokens": "prompt tokens that run or wait",
}
