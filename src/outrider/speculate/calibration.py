"""Measures what steps cost: runs synthetic steps of many shapes through the runner.

This takes up to ten seconds at start-up ($OUTRIDER_CALIBRATION_SECONDS). The shapes that matter most come
first. Shapes for which no time is left are interpolated (costs.py) and corrected by the steps that really
run. All shapes are timed once, then again, round after round, until the shortest times of each agree, and the
shortest one counts: compiling, growing memory and other processes only ever add time. All rows have one
modest length. Longer rows are modelled by one number, seconds for every further cell.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from outrider.config import InvalidConfig
from outrider.plan import NUM_SPARE_BLOCKS, CacheGeometry, RowPlan, StepPlan, StepRunner
from outrider.request import MAX_DEPTH, SamplingParams
from outrider.speculate.costs import CostTable, HeadCost, MeasuredCosts, StepShape

VARIABLE = "OUTRIDER_CALIBRATION_SECONDS"


def budget_s(environ: Mapping[str, str]) -> float:
    """Seconds of device time. 10 are chosen by hand: more would delay the start too much."""
    text = environ.get(VARIABLE, "10")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise InvalidConfig(f"{VARIABLE} must be a number of seconds, not {text!r}")
    return seconds


BUDGET_S = budget_s(os.environ)
MAX_WALL_FACTOR = 3.0  # limit by the wall clock on a busy machine, in BUDGET_S; chosen by hand
# A shape's shortest time is trusted if so many of its times differ by this ratio at most; chosen by hand.
NUM_AGREEING, AGREEMENT = 3, 1.08
MAX_RUNS = 12  # times that one shape is timed again; chosen by hand
OVERLAPPED_STEPS = 3  # steps that are timed together where steps overlap; chosen by hand
STORED_TOLERANCE = 1.3  # factor between a stored cost and a new measurement; chosen by hand
CHECKED = ((1, 4), (4, 1), (4, 4), (16, 1))  # rows and widths that are measured again at every start
TRACED_CHECKED = ((1, 5),)  # each new shape is compiled there
NUM_CELLS, MANY_CELLS = 128, 1024  # cells of the rows: long rows show the cost of a cell; chosen by hand
# In the order of importance, chosen by hand: the first NUM_FIRST row counts and widths are always measured.
ROW_COUNTS = (1, 4, 16, 8, 2, 32, 64)
WIDTHS = (1, 2, 4, 3, 9, 6, 5, 8, 7)
TRACED_WIDTHS = (1, 2, 5, 3, 9, 8)  # where passes are traced there are no others: shapes.FEW_WIDTHS
NUM_FIRST = 3
PADDED_WIDTH = 4  # of the step that shows what padding costs: one of the first WIDTHS
HEAD_DEPTHS = (0, MAX_DEPTH)  # fed only, and all drafts: the cost of drafts in between is linear

Clock = Callable[[], float]


@dataclass(frozen=True)
class SyntheticStep:
    """A decode step whose rows are all alike, or nearly."""

    rows: int
    width: int
    num_drafts_next: int | None = None  # drafts that the head makes; None: the head is not fed
    num_cells: int = NUM_CELLS
    is_sampled: bool = False  # tokens are sampled, not the most likely ones
    num_narrow: int = 0  # the last so many rows feed one token only, and padding
    num_missed: int = 0  # cells of every row that the head is fed now: it was paused


# A head that was paused is fed what it has missed. It makes no draft, nor does it in the compared step.
CATCHING_UP = SyntheticStep(1, 1, 0, num_missed=NUM_CELLS)


class StepTimer:
    """Runs synthetic steps and records their times."""

    def __init__(self, runner: StepRunner, vocab_size: int, clock: Clock) -> None:
        """`clock` measures device time: on a CPU the process's own time, else the wall clock."""
        self._runner = runner
        self._vocab_size = vocab_size
        self._clock = clock
        self._geometry = runner.geometry(256)
        self._device_start_s, self._wall_start_s = clock(), time.perf_counter()
        self._times: dict[SyntheticStep, list[float]] = {}  # shortest first
        self._cache_shape = (0, 0, 0)  # slots, cells and blocks of the runner's caches

    @property
    def shortest(self) -> dict[SyntheticStep, float]:
        return {step: times[0] for step, times in self._times.items()}

    def is_out_of_time(self) -> bool:
        device_s, wall_s = self._clock() - self._device_start_s, time.perf_counter() - self._wall_start_s
        return device_s > BUDGET_S or wall_s > MAX_WALL_FACTOR * BUDGET_S

    def time_once(self, step: SyntheticStep) -> None:
        plan = _plan(step, self._geometry, self._vocab_size)
        cache_shape = (plan.num_slots, plan.capacity, plan.num_blocks)
        is_compiled_now = step not in self._times and self._runner.compiles
        if cache_shape != self._cache_shape or is_compiled_now:
            self._runner.run(plan)  # not timed: this run makes the caches or compiles the pass
            self._cache_shape = cache_shape
        seconds = self._overlapped_s(plan) if self._runner.compiles else self._alone_s(plan)
        self._times[step] = sorted([*self._times.get(step, ()), seconds])

    def time_until_agreement(self, steps: Sequence[SyntheticStep]) -> None:
        """Time those steps again whose shortest times disagree, until the time is up.

        In rounds over all steps, because other processes may be busy for a second.
        """
        for _ in range(MAX_RUNS):
            for step in steps:
                if self.is_out_of_time():
                    return
                if not self.agrees(step):
                    self.time_once(step)

    def agrees(self, step: SyntheticStep) -> bool:
        times = self._times[step]
        return len(times) >= NUM_AGREEING and times[NUM_AGREEING - 1] <= AGREEMENT * times[0]

    def fits(self, step: SyntheticStep, max_cells: int, budget_bytes: int) -> bool:
        cells = step.num_cells + 2 * MAX_DEPTH
        return cells <= max_cells and cache_bytes(self._geometry, step.rows, cells) <= budget_bytes

    def _alone_s(self, plan: StepPlan) -> float:
        start_s = self._clock()
        self._runner.run(plan)
        return self._clock() - start_s

    def _overlapped_s(self, plan: StepPlan) -> float:
        """Seconds per step where every step is launched before the previous one is read, as in the engine."""
        in_flight, next_in_flight = self._runner.launch(plan), self._runner.launch(plan)
        self._runner.finish(in_flight)
        start_s = self._clock()
        for _ in range(OVERLAPPED_STEPS):
            in_flight, next_in_flight = next_in_flight, self._runner.launch(plan)
            self._runner.finish(in_flight)
        seconds = self._clock() - start_s
        self._runner.finish(next_in_flight)
        return seconds / OVERLAPPED_STEPS


def measure(
    runner: StepRunner,
    vocab_size: int,
    max_rows: int,
    max_cells: int,
    budget_bytes: int,
    *,
    clock: Clock = time.perf_counter,
) -> MeasuredCosts | None:
    """The costs of steps with up to `max_rows` rows. None if not even one row of a modest length fits."""
    timer = StepTimer(runner, vocab_size, clock)
    first, others = (
        [step for step in steps if timer.fits(step, max_cells, budget_bytes)]
        for steps in _steps_to_time(max_rows, runner.has_head, runner.compiles)
    )
    if SyntheticStep(1, 1) not in first:
        return None
    try:
        for step in first:
            timer.time_once(step)
        timer.time_until_agreement(first)
        for step in others:
            if timer.is_out_of_time():
                break
            timer.time_once(step)
        else:
            timer.time_until_agreement(others)
    finally:
        runner.reset()
    return _measured_costs(timer.shortest, has_cliffs=runner.compiles)


def max_measured_rows(max_rows: int) -> int:
    """The most rows that `measure` reaches for an engine of `max_rows`, if time and memory allow."""
    return max(count for count in ROW_COUNTS if count <= max_rows)


def is_still_valid(
    runner: StepRunner,
    vocab_size: int,
    stored: MeasuredCosts,
    max_cells: int,
    budget_bytes: int,
    *,
    clock: Clock = time.perf_counter,
) -> bool:
    """True if steps of a few shapes cost about as many plain steps of one row as in the stored costs.

    Stored costs may come from a time when the machine was busy. If it is busy now, this cannot be judged, and
    they are valid: what would be measured now would be no better.
    """
    timer = StepTimer(runner, vocab_size, clock)
    shapes = [(1, 1), *(TRACED_CHECKED if runner.compiles else CHECKED)]
    steps = [SyntheticStep(*shape) for shape in shapes if shape in stored.trunk_s]
    steps = [step for step in steps if timer.fits(step, max_cells, budget_bytes)]
    if not steps:
        return True
    try:
        for step in steps * NUM_AGREEING:
            timer.time_once(step)
        timer.time_until_agreement(steps)
    finally:
        runner.reset()
    if not all(map(timer.agrees, steps)):
        return True
    table, plain_s = CostTable(stored), timer.shortest[steps[0]]
    for step in steps:
        now = timer.shortest[step] / plain_s
        then = table.step_s(StepShape(step.rows, step.width)) / table.step_s(StepShape(1, 1))
        if not 1 / STORED_TOLERANCE < now / then < STORED_TOLERANCE:
            return False
    return True


def _steps_to_time(
    max_rows: int, has_head: bool, is_traced: bool
) -> tuple[list[SyntheticStep], list[SyntheticStep]]:
    """The steps that are timed in any case, and those that are timed if time is left."""
    widths = TRACED_WIDTHS if is_traced else WIDTHS
    counts = list(dict.fromkeys(count for count in (*ROW_COUNTS, max_rows) if count <= max_rows))
    first_counts, other_counts = counts[:NUM_FIRST], counts[NUM_FIRST:]
    first_widths, other_widths = widths[:NUM_FIRST], widths[NUM_FIRST:]
    depths = HEAD_DEPTHS if has_head else ()

    def steps(counts: list[int], widths: Sequence[int], depths: Sequence[int]) -> list[SyntheticStep]:
        found = []
        for rows in counts:
            found += [SyntheticStep(rows, width) for width in widths]
            found += [SyntheticStep(rows, 1, depth) for depth in depths]
        return found

    long = SyntheticStep(1, 1, None, MANY_CELLS)
    some_rows = first_counts[min(1, len(first_counts) - 1)]
    sampled = [SyntheticStep(some_rows, 1, depth, is_sampled=True) for depth in (None, *depths[-1:])]
    first = [*steps(first_counts, first_widths, depths), *sampled]
    if PADDED_WIDTH in first_widths:
        padded = [rows for rows in first_counts if rows > 1]
        first += [SyntheticStep(rows, PADDED_WIDTH, num_narrow=rows - 1) for rows in padded]
    if has_head and not is_traced:  # no head is paused there: see engine/draft_planner.py
        first.append(CATCHING_UP)
    return first, [long, *steps(other_counts, first_widths, depths), *steps(counts, other_widths, ())]


def _plan(step: SyntheticStep, geometry: CacheGeometry, vocab_size: int) -> StepPlan:
    rows = []
    for slot in range(step.rows):
        # Every row has its own tokens: equal rows would use the same experts.
        width = 1 if slot >= step.rows - step.num_narrow else step.width
        tokens = [(7 * i + 13 * slot + 11) % vocab_size for i in range(step.num_cells + width)]
        row = RowPlan(
            sequence_id=slot,
            slot=slot,
            start=step.num_cells,
            token_ids=tokens[step.num_cells :],
            num_drafts=width - 1,
            next_id=None,
            feeds_head=step.num_drafts_next is not None,
            num_drafts_next=step.num_drafts_next or 0,
            params=SamplingParams(temperature=1.0 if step.is_sampled else 0, seed=0),
            history=tokens[: step.num_cells + 1],
            num_prompt=1,
            head_start=step.num_cells - step.num_missed,
        )
        rows.append(row)
    return step_of(geometry, step.num_cells + 2 * MAX_DEPTH, rows)


def cache_bytes(geometry: CacheGeometry, num_rows: int, num_cells: int) -> int:
    """Bytes of the caches of `step_of`."""
    if geometry.has_blocks:
        return geometry.num_bytes_in_blocks(num_rows, num_blocks_for(geometry, num_rows, num_cells))
    return geometry.num_bytes(num_rows, geometry.capacity_for(num_cells))


def step_of(geometry: CacheGeometry, num_cells: int, rows: Sequence[RowPlan]) -> StepPlan:
    """A step of one pass. Each of its rows has `num_cells` cells or a few more."""
    if geometry.has_blocks:
        return in_blocks(geometry, num_cells, rows)
    return StepPlan(1 + max(row.slot for row in rows), geometry.capacity_for(num_cells), (), (tuple(rows),))


def num_blocks_for(geometry: CacheGeometry, num_rows: int, num_cells: int) -> int:
    return NUM_SPARE_BLOCKS + num_rows * geometry.blocks_for(num_cells)


def in_blocks(geometry: CacheGeometry, num_cells: int, rows: Sequence[RowPlan]) -> StepPlan:
    """A step of rows that have blocks for `num_cells` each: those of slot 0, those of slot 1, and so on."""
    num_slots, num = 1 + max(row.slot for row in rows), geometry.blocks_for(num_cells)
    firsts = [NUM_SPARE_BLOCKS + row.slot * num for row in rows]
    placed = [
        replace(row, blocks=tuple(range(first, first + num))) for row, first in zip(rows, firsts, strict=True)
    ]
    num_blocks = num_blocks_for(geometry, num_slots, num_cells)
    return StepPlan(num_slots, 0, (), (tuple(placed),), num_blocks=num_blocks)


def _measured_costs(shortest: Mapping[SyntheticStep, float], has_cliffs: bool) -> MeasuredCosts:
    """Differences of the shortest times. `has_cliffs`: more tokens may cost less, as on a GPU."""
    trunk = {(t.rows, t.width): s for t, s in shortest.items() if t == SyntheticStep(t.rows, t.width)}
    if not has_cliffs:  # a step that took longer than a larger one was disturbed
        trunk = {
            (rows, width): min(s for (r, w), s in trunk.items() if r >= rows and w >= width)
            for rows, width in trunk
        }
    head = {}
    for rows in sorted({step.rows for step in shortest if step.num_drafts_next is not None}):
        fed_s, deepest_s = (shortest.get(SyntheticStep(rows, 1, depth)) for depth in HEAD_DEPTHS)
        if fed_s is not None and deepest_s is not None and (rows, 1) in trunk:
            head[rows] = _head_cost(trunk[rows, 1], fed_s, deepest_s)
    long_s = shortest.get(SyntheticStep(1, 1, None, MANY_CELLS))
    cell_s = 0.0 if long_s is None else max(0.0, long_s - trunk[1, 1]) / (MANY_CELLS - NUM_CELLS)

    def sampling_s(has_drafts: bool) -> list[float]:
        """Seconds per row that sampling adds to the steps with, or without, drafts of the head."""
        steps = [t for t in shortest if t.is_sampled and (t.num_drafts_next is not None) == has_drafts]
        return [(shortest[t] - shortest[replace(t, is_sampled=False)]) / t.rows for t in steps]

    fed_s, caught_up_s = (shortest.get(SyntheticStep(1, 1, 0, num_missed=num)) for num in (0, NUM_CELLS))
    missed_s = 0.0 if fed_s is None or caught_up_s is None else max(0.0, caught_up_s - fed_s)

    sample_s = max([0.0, *sampling_s(has_drafts=False)])
    draft_sample_s = max([0.0, *(s - sample_s for s in sampling_s(has_drafts=True))]) / MAX_DEPTH
    return MeasuredCosts(
        trunk,
        head,
        NUM_CELLS,
        cell_s,
        sample_s,
        draft_sample_s,
        _padding_share(shortest, trunk),
        by_tokens=not has_cliffs,
        missed_cell_s=missed_s / NUM_CELLS,
    )


def _padding_share(shortest: Mapping[SyntheticStep, float], trunk: Mapping[tuple[int, int], float]) -> float:
    """What padding costs, as a share of what a token costs: from steps in which one row is wider.

    Their median: with one of them the share is as often too small as too large, and padding then looks free.
    """
    shares = []
    for step in (step for step in shortest if step.num_narrow):
        narrow_s, wide_s = trunk[step.rows, 1], trunk[step.rows, step.width]
        wider_s = (wide_s - narrow_s) / step.rows  # what one row adds
        padding_s = wider_s * step.num_narrow
        if padding_s > 0:
            shares.append(max(0.0, (shortest[step] - narrow_s - wider_s) / padding_s))
    return min(1.0, median(shares)) if shares else 1.0


def _head_cost(plain_s: float, fed_s: float, deepest_s: float) -> HeadCost:
    """Split the time of MAX_DEPTH drafts into feeding the head and drafting.

    A draft is a pass of the head and a projection onto the vocabulary. The first draft's pass is the feeding.
    Feeding is a small difference of two long times, so it is limited to a possible value: 10 to 60 % of a
    draft.
    """
    each_s = max(0.0, deepest_s - min(fed_s, plain_s)) / MAX_DEPTH
    feed_s = min(0.6 * each_s, max(0.1 * each_s, fed_s - plain_s))
    return HeadCost(feed_s, each_s - feed_s, each_s)
