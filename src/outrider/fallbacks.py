"""Fast code that is switched off in this process, and the reasons. Pure data.

The code that falls back notes it here. The banner, `/v1/status` and `outrider doctor` show it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fallback:
    part: str  # what is switched off, such as "delta-rule kernels"
    reason: str
    instead: str  # what is used in its place

    def __str__(self) -> str:
        return f"{self.part} ({self.reason}): using {self.instead}"


_noted: dict[str, Fallback] = {}


def note(part: str, reason: str, instead: str) -> None:
    _noted[part] = Fallback(part, reason, instead)


def noted() -> tuple[Fallback, ...]:
    return tuple(_noted.values())


def clear() -> None:
    """For tests."""
    _noted.clear()
