"""What a step costs on this machine: measured seconds by shape, corrected by the steps that really run.

    step = trunk(rows, width) + head(rows, width, drafts made) + cells attended beyond the measured length

Pure Python. Shapes between the measured ones are interpolated. A step's real time moves two things: the
machine's speed as a whole, quickly, and its own shape's correction, slowly but for the first few, and within
limits; a correction that is not confirmed fades. So neither a busy neighbour nor one slow step can spoil
the table.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.request import MAX_DEPTH

WIDTHS = range(1, MAX_DEPTH + 2)
WORTH_PADDING = 0.95  # pad where the wider shape costs less than this share
SPEED_GAIN, SHAPE_GAIN = 0.25, 0.04
FIRST_GAIN = 0.3  # of a shape's first step that counts; the next ones' are a half, a third of it
MOST_SURPRISE, MOST_SHAPE_SURPRISE = 0.8, 0.3  # as log ratios: what a step counts for, at most
MOST_CORRECTION = 0.5  # of a shape, as a log ratio
FADE = 0.999  # of a shape's correction, for every step that does not confirm it
HOST_GAIN = 0.1
VERSION_STEPS = 8  # for which what follows from the costs is not worked out again
KEPT_STEPS = 50  # a correction confirmed so often is worth keeping


@dataclass(frozen=True)
class HeadCost:
    """The head's part of a step, for one number of rows."""

    feed_s: float  # one token's pairs, nothing drafted
    first_s: float  # the first draft
    each_s: float  # every further one


@dataclass(frozen=True)
class StepShape:
    """What the cost of a decode step depends on."""

    rows: int
    width: int
    head_rows: int = 0  # rows that the head follows
    depth: int = 0  # drafts that the head makes
    num_cells: int = 0  # the longest row
    num_sampled: int = 0  # rows that draw their tokens, which takes longer than taking the best


@dataclass(frozen=True)
class Measured:
    """What was measured, as it was measured."""

    trunk_s: Mapping[tuple[int, int], float]  # (rows, width): at least (1, 1) and one other width
    head: Mapping[int, HeadCost]  # by rows; empty without a head
    num_cells: int = 128  # the rows' length while measuring
    cell_s: float = 0.0  # a step's extra seconds for every further cell of every row
    draw_s: float = 0.0  # for every token that is drawn instead of taken
    draft_draw_s: float = 0.0  # for every draft that is

    def as_json(self) -> dict[str, object]:
        return {
            "trunk_s": [[rows, width, s] for (rows, width), s in sorted(self.trunk_s.items())],
            "head": [[rows, c.feed_s, c.first_s, c.each_s] for rows, c in sorted(self.head.items())],
            "num_cells": self.num_cells,
            "cell_s": self.cell_s,
            "draw_s": self.draw_s,
            "draft_draw_s": self.draft_draw_s,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Measured:
        """Raises KeyError, TypeError or ValueError for anything that `as_json` cannot have made."""
        trunk = {(int(r), int(w)): _seconds(s) for r, w, s in data["trunk_s"]}  # type: ignore[attr-defined]
        if (1, 1) not in trunk or len(trunk) < 2:
            raise ValueError("not a table of costs")
        head = {int(r): HeadCost(*map(_seconds, costs)) for r, *costs in data["head"]}  # type: ignore[attr-defined]
        return cls(
            trunk,
            head,
            int(data["num_cells"]),  # type: ignore[call-overload]
            _seconds(data["cell_s"]),
            _seconds(data["draw_s"]),
            _seconds(data["draft_draw_s"]),
        )


class CostTable:
    """Costs of all shapes, from what was measured and what was seen since."""

    def __init__(self, measured: Measured, seen: Mapping[tuple[int, int], float] | None = None) -> None:
        self.measured = measured
        self._by_rows = _filled(measured.trunk_s)
        self._row_counts = sorted(self._by_rows)
        self._head_counts = sorted(measured.head)
        self._correction: dict[tuple[int, int], float] = dict(seen or {})
        self._confirmed = dict.fromkeys(self._correction, KEPT_STEPS)
        self._seen_at: dict[tuple[int, int], int] = {}
        self._num_steps = 0
        self._speed: float | None = None  # log of this machine's pace against the measured one
        self._grid: dict[tuple[int, int], float] = {}
        self._heads: dict[int, HeadCost] = {}
        self._best: dict[tuple[int, int], int] = {}  # widths, in this version
        self._best_of = 0
        self.host_share = 0.0  # of a step's time, in which the device waits for it to be launched

    @property
    def has_head(self) -> bool:
        return bool(self._head_counts)

    def step_s(self, shape: StepShape) -> float:
        """Expected seconds, at the speed of the measurements."""
        seconds = self._trunk_s(shape.rows, shape.width) * math.exp(self._corrected(shape.rows, shape.width))
        beyond = max(0, shape.num_cells - self.measured.num_cells)
        cells_s = beyond * shape.rows * self.measured.cell_s
        return seconds + cells_s + self._drawn_s(shape) + self.head_s(shape)

    def _drawn_s(self, shape: StepShape) -> float:
        num_tokens = shape.num_sampled * shape.width
        num_drafts = min(shape.num_sampled, shape.head_rows) * shape.depth
        return num_tokens * self.measured.draw_s + num_drafts * self.measured.draft_draw_s

    def measured_s(self, rows: int, width: int, num_cells: int) -> float:
        """What a step without a head took when it was measured."""
        beyond = max(0, num_cells - self.measured.num_cells)
        return self._trunk_s(rows, width) + beyond * rows * self.measured.cell_s

    def head_s(self, shape: StepShape) -> float:
        """The head's part: feeding costs what the trunk's width makes of it, drafting costs its passes."""
        if shape.head_rows == 0 or not self._head_counts:
            return 0.0
        cost = self._head_cost(shape.head_rows)
        wider = self._trunk_s(shape.rows, shape.width) / self._trunk_s(shape.rows, 1)
        drafting = cost.first_s + (shape.depth - 1) * cost.each_s if shape.depth else 0.0
        return cost.feed_s * wider + drafting

    def head_row_s(self, rows: int, head_rows: int, depth: int) -> float:
        """What one of the rows that the head follows adds to its passes."""
        if head_rows < 2:
            return 0.0
        each = [self.head_s(StepShape(rows, 1 + depth, num, depth)) for num in (head_rows, head_rows - 1)]
        return max(0.0, each[0] - each[1])

    def best_width(self, rows: int, width: int) -> int:
        """The width for a forward pass that needs `width`: a wider one where that is known to cost less."""
        if self._best_of != self.version:
            self._best_of, self._best = self.version, {}
        found = self._best.get((rows, width))
        if found is None:
            found = self._best[rows, width] = self._best_width(rows, width)
        return found

    @property
    def version(self) -> int:
        """While it stays, costs are nearly what they were."""
        return self._num_steps // VERSION_STEPS

    def _best_width(self, rows: int, width: int) -> int:
        if (rows, width) not in self.measured.trunk_s:
            return width
        wider = [w for w in WIDTHS if w > width and (rows, w) in self.measured.trunk_s]
        cost = {w: self._trunk_s(rows, w) * math.exp(self._corrected(rows, w)) for w in (width, *wider)}
        best = min(cost, key=lambda w: (cost[w], w))
        return best if cost[best] < WORTH_PADDING * cost[width] else width

    # -- steps that really run ---------------------------------------------------------------------------

    def observe(self, shape: StepShape, seconds: float, host_s: float | None = None) -> None:
        """A step of this shape took so long, of which `host_s` passed before it was launched.

        The caller leaves out steps that did something else as well.
        """
        self._num_steps += 1
        if host_s is not None:
            share = min(1.0, host_s / max(seconds, 1e-9))
            self.host_share += HOST_GAIN * (share - self.host_share)
        key = (shape.rows, shape.width)
        if key not in self._seen_at:  # the first of its shape may have been compiled, or grown the memory
            self._seen_at[key] = self._num_steps
            return
        ratio = math.log(max(seconds, 1e-9) / self.step_s(shape))
        if self._speed is None:
            self._speed = ratio
        surprise = ratio - self._speed
        self._speed += SPEED_GAIN * _within(MOST_SURPRISE, surprise)
        gain = SHAPE_GAIN
        if abs(surprise) < MOST_SURPRISE:  # else it says more about the machine
            gain = max(gain, FIRST_GAIN / (1 + self._confirmed.get(key, 0)))
        corrected = self._corrected(*key) + gain * _within(MOST_SHAPE_SURPRISE, surprise)
        self._correction[key] = _within(MOST_CORRECTION, corrected)
        self._seen_at[key] = self._num_steps
        self._confirmed[key] = self._confirmed.get(key, 0) + 1

    def seen(self) -> dict[tuple[int, int], float]:
        """The corrections that are sure enough to be kept."""
        sure = (key for key, num in self._confirmed.items() if num >= KEPT_STEPS)
        return {key: round(self._corrected(*key), 4) for key in sure}

    def _corrected(self, rows: int, width: int) -> float:
        correction = self._correction.get((rows, width))
        if correction is None:
            return 0.0
        age = self._num_steps - self._seen_at.get((rows, width), 0)
        return correction * FADE**age

    # -- between the measured shapes ---------------------------------------------------------------------

    def _trunk_s(self, rows: int, width: int) -> float:
        found = self._grid.get((rows, width))
        if found is None:
            costs = [self._by_rows[count][width] for count in self._row_counts]
            found = self._grid[rows, width] = _interpolated(self._row_counts, costs, rows)
        return found

    def _head_cost(self, rows: int) -> HeadCost:
        found = self._heads.get(rows)
        if found is None:
            counts, costs = self._head_counts, self.measured.head
            parts = (
                _interpolated(counts, [getattr(costs[count], name) for count in counts], rows)
                for name in ("feed_s", "first_s", "each_s")
            )
            found = self._heads[rows] = HeadCost(*parts)
        return found


def guessed_costs() -> Measured:
    """For when nothing was measured: a machine on which a row is nearly free and a width is cheap."""
    trunk = {(r, w): 1.0 + 0.02 * (r - 1) + 0.05 * (w - 1) * (1 + r / 4) for r in (1, 64) for w in WIDTHS}
    return Measured(trunk, {1: HeadCost(0.03, 0.03, 0.06), 64: HeadCost(0.1, 0.1, 0.2)})


def _filled(trunk_s: Mapping[tuple[int, int], float]) -> dict[int, dict[int, float]]:
    """Every width for every measured number of rows."""
    filled = {}
    for rows in sorted({rows for rows, _ in trunk_s}):
        widths = sorted(width for r, width in trunk_s if r == rows)
        if widths[0] != 1 or len(widths) < 2:
            continue  # what speculation costs at this number of rows was not measured
        costs = [trunk_s[rows, width] for width in widths]
        filled[rows] = {width: _interpolated(widths, costs, width) for width in WIDTHS}
    if 1 not in filled:
        raise ValueError("the costs of one row, of width 1 and wider, were not measured")
    return filled


def _interpolated(places: Sequence[int], values: Sequence[float], at: int) -> float:
    """On straight lines through the points; beyond the last one along its line, but never down."""
    right = bisect_left(places, at)
    if right < len(places) and places[right] == at:
        return values[right]
    if right == 0 or len(places) == 1:
        return values[0]
    if right == len(places):
        slope = (values[-1] - values[-2]) / (places[-1] - places[-2])
        return values[-1] + max(0.0, slope) * (at - places[-1])
    share = (at - places[right - 1]) / (places[right] - places[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])


def _within(limit: float, value: float) -> float:
    return min(limit, max(-limit, value))


def _seconds(value: object) -> float:
    seconds = float(value)  # type: ignore[arg-type]
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{value!r} is not a time")
    return seconds
