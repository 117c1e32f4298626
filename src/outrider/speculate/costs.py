"""What a step costs on this machine: measured seconds for every shape, corrected by the steps that run.

    step_s = trunk_s(rows, width) * exp(correction)                interpolated between the measured shapes
           + rows * cells beyond the measured length * cell_s
           + sampled tokens * sample_s + sampled drafts * draft_sample_s
           + head_s = feed_s * trunk_s(rows, width) / trunk_s(rows, 1) + first_s + further drafts * each_s

The time of a real step changes two estimates. With deviation = log(real_s / step_s) - slowdown:

    slowdown      of the whole machine, quickly:   slowdown   += SLOWDOWN_GAIN * deviation
    correction    of the step's shape, slowly:     correction += CORRECTION_GAIN * deviation

A step between two entries changes both corrections, each by its part. The first few steps of an entry change
its correction more. A step that was disturbed by other load changes the slowdown alone, by a limited amount,
and a correction that no step confirms decays. So neither a busy machine nor one slow step spoils the table.

Where a step's cost follows from its tokens (CPUs), measurements are kept near a line through all of them
(token_costs.py), and shapes have no corrections: those that run would be corrected and those that never run
would not, so that the difference between them, the price of a draft, would be wrong. One factor corrects this
price, for all shapes: it rises if steps with more drafts than usual take longer than expected. Steps do not
overlap there, and the host's part before the launch adds about the same time to each shape:

    real_s = step_s * exp(slowdown) + host_s      host_s: running means, of steps without and with drafts

Pure Python.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.request import MAX_DEPTH
from outrider.speculate.token_costs import near_line

WIDTHS = range(1, MAX_DEPTH + 2)

# In the ablation's bursts these are equal at half and twice their values. Without them a wrong or disturbed
# measurement is never corrected: tests/speculate/test_costs.py.
SLOWDOWN_GAIN = 0.25  # share of a step's deviation by which the machine's slowdown changes
CORRECTION_GAIN = 0.04  # share of a step's deviation by which its shape's correction changes
# Share of a step's deviation by which the price of drafts changes, times their part in the step. From the
# ablation: where costs are wrong at first 0 costs 0.8 %; 0.25 to 2 are equal.
DRAFT_PRICE_GAIN = 1.0
MAX_DEVIATION = 0.8  # log ratio: a step 2.2 times as long as expected was disturbed by other load
MAX_CORRECTION = 0.5  # log ratio: a shape's cost is corrected by a factor of 1.65 at most
CORRECTION_DECAY = 0.999  # of a shape's correction, with every step of another shape
CONFIRMED_STEPS = 50  # steps after which a shape's correction is stored between runs; chosen by hand
NEWEST_SHARE = 0.1  # weight of the newest step in running means: about 10 steps count; 0.05 and 0.2 are equal


@dataclass(frozen=True)
class HeadCost:
    """Seconds that the head adds to a step, for one number of rows."""

    feed_s: float  # to feed the head one token of every row, without a draft
    first_s: float  # for the first draft
    each_s: float  # for every further draft


@dataclass(frozen=True)
class StepShape:
    """What the cost of a decode step depends on."""

    rows: int
    width: float  # tokens that each row feeds; on average, if padding costs less than tokens
    head_rows: int = 0  # rows for which the head is fed
    num_drafts_next: int = 0  # drafts that the head makes in this step
    num_cells: int = 0  # cells of the longest row
    num_sampled: int = 0  # rows that sample their tokens, which takes longer than the most likely token


@dataclass(frozen=True)
class MeasuredCosts:
    """The seconds that calibration measured, unchanged."""

    trunk_s: Mapping[tuple[int, int], float]  # by (rows, width): at least (1, 1) and one other width
    head: Mapping[int, HeadCost]  # by rows; empty without a head
    num_cells: int = 128  # the length of the rows in the measurement
    cell_s: float = 0.0  # for every further cell of every row
    sample_s: float = 0.0  # for every token that is sampled
    draft_sample_s: float = 0.0  # for every draft that is sampled
    padding_share: float = 1.0  # what padding costs, as a share of what a token costs
    by_tokens: bool = False  # steps with as many tokens cost about the same: no cliffs
    missed_cell_s: float = 0.0  # to feed a paused head one cell that it has missed; 0 where none is paused

    def as_json(self) -> dict[str, object]:
        return {
            "trunk_s": [[rows, width, s] for (rows, width), s in sorted(self.trunk_s.items())],
            "head": [[rows, c.feed_s, c.first_s, c.each_s] for rows, c in sorted(self.head.items())],
            "num_cells": self.num_cells,
            "cell_s": self.cell_s,
            "sample_s": self.sample_s,
            "draft_sample_s": self.draft_sample_s,
            "padding_share": self.padding_share,
            "by_tokens": self.by_tokens,
            "missed_cell_s": self.missed_cell_s,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> MeasuredCosts:
        """Raise KeyError, TypeError or ValueError for data that `as_json` cannot have made."""
        trunk = {(int(r), int(w)): seconds_of(s) for r, w, s in data["trunk_s"]}  # type: ignore[attr-defined]
        if (1, 1) not in trunk or len(trunk) < 2:
            raise ValueError("a cost table needs the cost of one row of width 1 and of a second shape")
        head = {int(r): HeadCost(*map(seconds_of, costs)) for r, *costs in data["head"]}  # type: ignore[attr-defined]
        return cls(
            trunk,
            head,
            int(data["num_cells"]),  # type: ignore[call-overload]
            seconds_of(data["cell_s"]),
            seconds_of(data["sample_s"]),
            seconds_of(data["draft_sample_s"]),
            min(1.0, seconds_of(data["padding_share"])),
            bool(data["by_tokens"]),
            seconds_of(data["missed_cell_s"]),
        )


class CostTable:
    """The cost of every shape: measured, interpolated, and corrected by the steps that have run since."""

    def __init__(
        self,
        measured: MeasuredCosts,
        corrections: Mapping[tuple[int, int], float] | None = None,
        *,
        in_seconds: bool = True,
    ) -> None:
        """`in_seconds`: False if `measured` is a guess, whose unit is unknown."""
        self.measured = measured
        self._in_seconds = in_seconds
        self.host_share = 0.0  # share of a step's time in which the device waits for the host's launch
        self._host_s = [0.0, 0.0]  # before the launch: of plain steps, of steps with drafts
        self._trunk_by_rows = _all_widths(
            near_line(measured.trunk_s) if measured.by_tokens else measured.trunk_s
        )
        self._row_counts = sorted(self._trunk_by_rows)
        self._head_row_counts = sorted(measured.head)
        self._corrections = dict(corrections or {})  # log ratios, by (rows, width)
        self._num_observed: dict[tuple[int, int], float] = dict.fromkeys(self._corrections, CONFIRMED_STEPS)
        self._last_observed: dict[tuple[int, int], int] = {}  # number of the entry's last step
        self._draft_price = 0.0  # log ratio of what drafts cost to what was measured; by tokens
        self._mean_draft_share = 0.0  # running mean of the drafts' part of a step
        self._seen: set[tuple[int, int]] = set()  # shapes that have run
        self._num_steps = 0
        self._slowdown: float | None = None  # log ratio of real to expected times, for all shapes together
        self._trunk_cache: dict[tuple[int, int], float] = {}
        self._head_cache: dict[int, HeadCost] = {}

    def step_s(self, shape: StepShape) -> float:
        """Expected seconds, on a machine as fast as in the measurement."""
        without_head_s = self.step_without_head_s(shape.rows, shape.width, shape.num_cells, shape.num_sampled)
        num_drafts = min(shape.num_sampled, shape.head_rows) * shape.num_drafts_next
        return without_head_s + num_drafts * self.measured.draft_sample_s + self.head_s(shape)

    def step_without_head_s(self, rows: int, width: float, num_cells: int, num_sampled: int) -> float:
        """The same of a step in which the head does nothing."""
        sampling_s = num_sampled * width * self.measured.sample_s
        return self._corrected_s(rows, width) + self._extra_cells_s(rows, num_cells) + sampling_s

    def real_s(self, shape: StepShape) -> float | None:
        """Expected seconds on the machine as it is now. None if no step has shown yet how long steps take."""
        if self._slowdown is None:
            return self.step_s(shape) if self._in_seconds else None
        return self.step_s(shape) * math.exp(self._slowdown) + self._host_s[_has_drafts(shape)]

    def host_part_s(self, has_drafts: bool) -> float:
        """The host's part of a step, before the launch, on a machine as fast as in the measurement."""
        return self._host_s[has_drafts] * math.exp(-(self._slowdown or 0.0))

    def mean_width(self, rows: int, num_tokens: float, width: int) -> float:
        """The width at which equal rows cost as much as these: `num_tokens` in all, padded to `width`.

        At least 1: some of the rows may be padding.
        """
        num_paid = num_tokens + self.measured.padding_share * (rows * width - num_tokens)
        return max(1.0, num_paid / rows)

    def uncorrected_s(self, rows: int, width: int, num_cells: int) -> float:
        """Seconds of a step without a head, from the measurements alone."""
        return self._trunk_s(rows, width) + self._extra_cells_s(rows, num_cells)

    def head_s(self, shape: StepShape) -> float:
        """The head's part of a step. A wider pass makes feeding the head longer in the same ratio."""
        if shape.head_rows == 0 or not self._head_row_counts:
            return 0.0
        cost = self._head_cost(shape.head_rows)
        width = round(shape.width)
        widening = self._trunk_s(shape.rows, width) / self._trunk_s(shape.rows, 1) if width > 1 else 1.0
        num_drafts = shape.num_drafts_next
        drafting_s = cost.first_s + (num_drafts - 1) * cost.each_s if num_drafts else 0.0
        return cost.feed_s * widening + drafting_s

    def head_row_s(self, rows: int, head_rows: int, num_drafts_next: int) -> float:
        """Seconds that one more row adds to the head's passes."""
        if head_rows < 2:
            return 0.0
        width = 1 + num_drafts_next
        with_row, without = (
            self.head_s(StepShape(rows, width, num, num_drafts_next)) for num in (head_rows, head_rows - 1)
        )
        return max(0.0, with_row - without)

    # -- steps that really run ---------------------------------------------------------------------------

    def observe(self, shape: StepShape, seconds: float, host_s: float | None = None) -> None:
        """A step of this shape took `seconds`, of which `host_s` passed before its launch.

        The caller leaves out steps that did other work as well.
        """
        self._num_steps += 1
        if host_s is not None:
            share = min(1.0, host_s / max(seconds, 1e-9))
            self.host_share += NEWEST_SHARE * (share - self.host_share)
            if self.measured.by_tokens:
                self._count_host(_has_drafts(shape), max(host_s, 1e-9))
                seconds -= host_s
        key = (shape.rows, round(shape.width))
        if key not in self._seen:  # a shape's first step may have compiled code or grown memory
            self._seen.add(key)
            return
        ratio = math.log(max(seconds, 1e-9) / self.step_s(shape))
        if self._slowdown is None:
            self._slowdown = ratio
        deviation = ratio - self._slowdown
        self._slowdown += SLOWDOWN_GAIN * clipped(deviation, MAX_DEVIATION)
        is_disturbed = abs(deviation) >= MAX_DEVIATION
        if self.measured.by_tokens:
            self._count_draft_price(shape, 0.0 if is_disturbed else deviation)
        else:
            self._correct(self._entries(shape.rows, shape.width), 0.0 if is_disturbed else deviation)

    def _count_host(self, has_drafts: bool, host_s: float) -> None:
        """Steps of the other kind follow by half: what the host does for rows is a part of both."""
        if not self._host_s[has_drafts]:
            self._host_s = [host_s, host_s]
        deviation = clipped(math.log(host_s / self._host_s[has_drafts]), MAX_DEVIATION)
        for kind in (False, True):
            gain = NEWEST_SHARE if kind == has_drafts else NEWEST_SHARE / 2
            self._host_s[kind] *= math.exp(gain * deviation)

    def _count_draft_price(self, shape: StepShape, deviation: float) -> None:
        """Drafts cost more than expected if steps with more of them than usual deviate by more than usual."""
        share = 1 - self._trunk_s(shape.rows, 1) / self._corrected_s(shape.rows, shape.width)
        more = share - self._mean_draft_share
        self._mean_draft_share += SLOWDOWN_GAIN * more
        price = self._draft_price + DRAFT_PRICE_GAIN * deviation * more
        self._draft_price = clipped(price, MAX_CORRECTION)

    def _correct(self, entries: Sequence[tuple[tuple[int, int], float]], deviation: float) -> None:
        """Change these entries' corrections, so that a step between them deviates less."""
        total = sum(part * part for _, part in entries)
        for key, part in entries:
            num_observed = self._num_observed.get(key, 0.0)
            gain = max(CORRECTION_GAIN, 1 / (2 + num_observed))  # the measurement counts as one step
            correction = self._correction(*key) + gain * part / total * deviation
            self._corrections[key] = clipped(correction, MAX_CORRECTION)
            self._last_observed[key] = self._num_steps
            self._num_observed[key] = num_observed + part

    def confirmed_corrections(self) -> dict[tuple[int, int], float]:
        """The corrections of shapes that were observed often enough to be stored between runs."""
        confirmed = (key for key, num in self._num_observed.items() if num >= CONFIRMED_STEPS)
        return {key: round(self._correction(*key), 4) for key in confirmed}

    def _correction(self, rows: int, width: int) -> float:
        correction = self._corrections.get((rows, width))
        if correction is None:
            return 0.0
        return correction * CORRECTION_DECAY ** (self._num_steps - self._last_observed.get((rows, width), 0))

    def _entries(self, rows: int, width: float) -> list[tuple[tuple[int, int], float]]:
        """The entries of the corrections between which a shape lies, and its part in each."""
        narrow = int(width)
        entries = [((rows, narrow), 1 - (width - narrow)), ((rows, narrow + 1), width - narrow)]
        return [(key, part) for key, part in entries if part > 0]

    # -- between the measured shapes ---------------------------------------------------------------------

    def _extra_cells_s(self, rows: int, num_cells: int) -> float:
        return max(0, num_cells - self.measured.num_cells) * rows * self.measured.cell_s

    def _corrected_s(self, rows: int, width: float) -> float:
        if self.measured.by_tokens:
            plain_s = self._trunk_s(rows, 1)
            return plain_s + math.exp(self._draft_price) * (self._trunk_s(rows, width) - plain_s)
        correction = sum(part * self._correction(*key) for key, part in self._entries(rows, width))
        return self._trunk_s(rows, width) * math.exp(correction)

    def _trunk_s(self, rows: int, width: float) -> float:
        narrow = int(width)
        seconds = self._shape_s(rows, narrow)
        if narrow == width:
            return seconds
        return seconds + (width - narrow) * (self._shape_s(rows, narrow + 1) - seconds)

    def _shape_s(self, rows: int, width: int) -> float:
        if (rows, width) not in self._trunk_cache:
            costs = [self._trunk_by_rows[count][width] for count in self._row_counts]
            self._trunk_cache[rows, width] = interpolated(self._row_counts, costs, rows)
        return self._trunk_cache[rows, width]

    def _head_cost(self, rows: int) -> HeadCost:
        if rows not in self._head_cache:
            counts, costs = self._head_row_counts, self.measured.head
            parts = (
                interpolated(counts, [getattr(costs[count], name) for count in counts], rows)
                for name in ("feed_s", "first_s", "each_s")
            )
            self._head_cache[rows] = HeadCost(*parts)
        return self._head_cache[rows]


def guessed_costs() -> MeasuredCosts:
    """Costs without a measurement, in plain steps: rows are nearly free and width is cheap, as on a GPU."""
    trunk = {(r, w): 1.0 + 0.02 * (r - 1) + 0.05 * (w - 1) * (1 + r / 4) for r in (1, 64) for w in WIDTHS}
    head = {1: HeadCost(0.03, 0.03, 0.06), 64: HeadCost(0.1, 0.1, 0.2)}
    return MeasuredCosts(trunk, head, missed_cell_s=0.001)


def _has_drafts(shape: StepShape) -> bool:
    return shape.width > 1 or shape.num_drafts_next > 0


def _all_widths(trunk_s: Mapping[tuple[int, int], float]) -> dict[int, dict[int, float]]:
    """Seconds by rows and width, with every width interpolated for every measured number of rows.

    A number of rows is left out if only one width was measured: the cost of drafting is not known there.
    """
    filled = {}
    for rows in sorted({rows for rows, _ in trunk_s}):
        widths = sorted(width for r, width in trunk_s if r == rows)
        if widths[0] == 1 and len(widths) > 1:
            costs = [trunk_s[rows, width] for width in widths]
            filled[rows] = {width: interpolated(widths, costs, width) for width in WIDTHS}
    if 1 not in filled:
        raise ValueError("a cost table needs the costs of one row, of width 1 and of a second width")
    return filled


def interpolated(places: Sequence[int], values: Sequence[float], at: float) -> float:
    """The value at `at`, on straight lines between the points. Beyond the last point the line never falls."""
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


def clipped(value: float, limit: float) -> float:
    return min(limit, max(-limit, value))


def seconds_of(value: object) -> float:
    seconds = float(value)  # type: ignore[arg-type]
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{value!r} is not a number of seconds")
    return seconds
