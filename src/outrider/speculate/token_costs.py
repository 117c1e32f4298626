"""What steps cost by their tokens, where no shape has a cliff: on CPUs.

A measured time may be wrong, since other processes were busy then. Here one time counts little: steps of
different shapes with about as many tokens are measured too, and cost about the same. With t tokens in r rows

    log(step_s) = g(log t) + b * log(r)

where g is a line through the measurements around t, and b is small: rows have attention, and work of the
host, of their own. A measurement counts as it is if it is near this line, since some shapes do cost less than
others with as many tokens; if not, it was disturbed, and is moved towards the line. Pure Python.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from statistics import median

# Log ratio of tokens by which a measurement's weight falls to 0.6. In the simulator, with measurements that
# are wrong by 40 % each, 16 rows reach 0.98, 0.97 and 0.96 of drafts off with 0.3, 0.2 and 0.12. With right
# ones 0.3 costs one row 2 % of what drafts bring: costs are no straight line there.
NEARBY = 0.2
MOST_BY_ROWS = 0.15  # b is between 0 and this: 0.03 to 0.1 on the CPUs of docs/BENCHMARKS.md
# Log ratio of a measurement to the line. From the ablation: any distance costs 0.4 % where each draft is
# judged, and 0 costs 0.4 % elsewhere. With 0.08 a lucky measurement made one row's third draft look free.
MAX_FROM_LINE = 0.04


def near_line(trunk_s: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """The measurements, each moved to within MAX_FROM_LINE of the line."""
    line, low, high = TokenCosts(trunk_s), math.exp(-MAX_FROM_LINE), math.exp(MAX_FROM_LINE)
    expected = {shape: line.step_s(*shape) for shape in trunk_s}
    return {
        shape: min(high * expected[shape], max(low * expected[shape], seconds))
        for shape, seconds in trunk_s.items()
    }


class TokenCosts:
    def __init__(self, trunk_s: Mapping[tuple[int, int], float]) -> None:
        """`trunk_s`: seconds of steps, by (rows, width)."""
        self._by_rows = _share_of_rows(trunk_s)
        self._points = [
            (math.log(rows * width), math.log(seconds) - self._by_rows * math.log(rows))
            for (rows, width), seconds in trunk_s.items()
        ]
        self._most_tokens = max(rows * width for rows, width in trunk_s)
        self._seconds: dict[int, float] = {}  # of one row, by tokens

    def step_s(self, rows: int, width: float) -> float:
        tokens = rows * width
        at = min(tokens, self._most_tokens)
        fewer = int(at)
        seconds = self._seconds_of(fewer)
        if at > fewer:
            seconds += (at - fewer) * (self._seconds_of(fewer + 1) - seconds)
        return seconds * rows**self._by_rows * max(1.0, tokens / self._most_tokens)

    def _seconds_of(self, tokens: int) -> float:
        if tokens not in self._seconds:
            self._seconds[tokens] = math.exp(self._line_at(math.log(tokens)))
        return self._seconds[tokens]

    def _line_at(self, x: float) -> float:
        """The value at `x` of a line through the points, of which the nearest count most."""
        weights = [math.exp(-0.5 * ((at - x) / NEARBY) ** 2) for at, _ in self._points]
        total = sum(weights)
        mean_x, mean_y = (
            sum(weight * point[i] for weight, point in zip(weights, self._points, strict=True)) / total
            for i in (0, 1)
        )
        spread = slope = 0.0
        for weight, (at, value) in zip(weights, self._points, strict=True):
            spread += weight * (at - mean_x) ** 2
            slope += weight * (at - mean_x) * (value - mean_y)
        return mean_y + (slope / spread * (x - mean_x) if spread > 1e-9 else 0.0)


def _share_of_rows(trunk_s: Mapping[tuple[int, int], float]) -> float:
    """b: by how much more steps cost that have as many tokens in more rows."""
    found = [
        math.log(one_s / other_s) / math.log(rows / other_rows)
        for ((rows, width), one_s), ((other_rows, other_width), other_s) in combinations(trunk_s.items(), 2)
        if rows * width == other_rows * other_width and min(one_s, other_s) > 0
    ]
    return min(MOST_BY_ROWS, max(0.0, median(found))) if found else 0.0
