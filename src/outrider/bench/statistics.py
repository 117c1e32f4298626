"""Percentiles and spreads. Pure arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Weighted = tuple[float, float]  # (value, weight)


@dataclass(frozen=True)
class Spread:
    """Several measurements of one quantity."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        return cls(statistics.median(values), min(values), max(values)) if values else None

    def text(self, digits: int) -> str:
        return f"{self.median:.{digits}f} ({self.least:.{digits}f}-{self.most:.{digits}f})"


def percentile(values: Iterable[float], share: float) -> float | None:
    """The smallest value such that at least `share` of all values are not greater."""
    return weighted_percentile(((value, 1.0) for value in values), share)


def weighted_percentile(pairs: Iterable[Weighted], share: float) -> float | None:
    """The percentile of a list in which each value occurs as often as its weight."""
    ordered = sorted(pair for pair in pairs if pair[1] > 0)
    if not ordered:
        return None
    wanted, so_far = share * sum(weight for _, weight in ordered), 0.0
    for value, weight in ordered:
        so_far += weight
        if so_far >= wanted * (1 - 1e-12):  # rounding errors of the sum must not skip a value
            return value
    return ordered[-1][0]
