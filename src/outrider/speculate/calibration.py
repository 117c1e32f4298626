"""Measures what steps cost, by running made-up ones through the runner: real forwards, picks, head passes.

Up to ten seconds at start-up. The shapes that matter most come first; where time runs out the rest is
interpolated and corrected by the steps that really run. All shapes are tried once, then each until its two
shortest times agree, and the shortest is taken: compiling, growing memory and others' work on the machine
only ever add, and a busy second is over when a shape's turn comes again. All rows have one modest length;
longer rows are modelled by one number, seconds a further cell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Protocol

from outrider.config import CacheGeometry
from outrider.plan import RowPlan, StepPlan, StepResult
from outrider.request import MAX_DEPTH, SamplingParams
from outrider.speculate.costs import CostTable, HeadCost, Measured, StepShape

BUDGET_S = 10.0  # of the device's time
AGREEING = 1.08  # a trial's two shortest times, one over the other, once they can be believed
MOST_RUNS = 5  # of a trial
AHEAD_STEPS = 3  # timed together where a step is launched before the one in front of it is read
PATIENCE = 3.0  # how much longer that may take on a busy machine
TOLERANCE = 1.3  # by which a kept table's cost of a width may be off
NUM_CELLS, MANY_CELLS = 128, 1024
ROW_COUNTS = (1, 4, 16, 8, 2, 32, 64)  # those that say most come first
FIRST_COUNTS = 3  # that many of them, and of the widths, are measured before the others
WIDTHS = (1, 2, 4, 3, 9, 6, 5, 8, 7)
TRACED_WIDTHS = (1, 2, 5, 3, 9, 8)  # there are no others where passes are traced: shapes.FEW_WIDTHS
HEAD_DEPTHS = (0, MAX_DEPTH)

Clock = Callable[[], float]


class Runs(Protocol):
    """What of a runner is needed."""

    @property
    def has_head(self) -> bool: ...

    @property
    def compiles(self) -> bool: ...

    def geometry(self, capacity_step: int) -> CacheGeometry: ...

    def run(self, plan: StepPlan) -> StepResult: ...

    def launch(self, plan: StepPlan) -> Any: ...

    def finish(self, launched: Any) -> StepResult: ...

    def reset(self) -> None: ...


@dataclass(frozen=True)
class Trial:
    """A made-up step: all its rows are alike."""

    rows: int
    width: int
    depth: int | None = None  # drafts that the head makes; None: it is not fed
    num_cells: int = NUM_CELLS
    draws: bool = False  # tokens, instead of taking the best


class Stopwatch:
    """The shortest time of each trial."""

    def __init__(self, runner: Runs, vocab_size: int, clock: Clock) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._clock = clock
        self._geometry = runner.geometry(256)
        self._started_s, self._began_s = clock(), time.perf_counter()
        self._times: dict[Trial, list[float]] = {}  # shortest first
        self._shape = (0, 0)  # slots and cells of the caches

    @property
    def best(self) -> dict[Trial, float]:
        return {trial: times[0] for trial, times in self._times.items()}

    def is_late(self, budget_s: float) -> bool:
        busy, waited = self._clock() - self._started_s, time.perf_counter() - self._began_s
        return busy > budget_s or waited > PATIENCE * budget_s

    def run(self, trial: Trial) -> float:
        plan = _plan(trial, self._geometry, self._vocab_size)
        shape = (plan.num_slots, plan.capacity)
        is_new = trial not in self._times and self._runner.compiles
        if shape != self._shape or is_new:  # it also makes the caches, or compiles: it says nothing
            self._runner.run(plan)
            self._shape = shape
        seconds = self._ahead_s(plan) if self._runner.compiles else self._alone_s(plan)
        self._times[trial] = sorted([*self._times.get(trial, ()), seconds])
        return seconds

    def _alone_s(self, plan: StepPlan) -> float:
        before = self._clock()
        self._runner.run(plan)
        return self._clock() - before

    def _ahead_s(self, plan: StepPlan) -> float:
        """As the engine runs them where steps are traced: one is launched before another is read."""
        under_way = self._runner.launch(plan)
        following = self._runner.launch(plan)
        self._runner.finish(under_way)
        before = self._clock()
        for _ in range(AHEAD_STEPS):
            under_way, following = following, self._runner.launch(plan)
            self._runner.finish(under_way)
        seconds = self._clock() - before
        self._runner.finish(following)
        return seconds / AHEAD_STEPS

    def settle(self, trial: Trial) -> None:
        """Run it until its time can be believed, or there is no time left."""
        for _ in range(len(self._times[trial]), MOST_RUNS):
            self.run(trial)
            shortest, second, *_ = self._times[trial]
            if self.is_late(BUDGET_S) or second <= AGREEING * shortest:
                return

    def fits(self, trial: Trial, max_cells: int, budget_bytes: int) -> bool:
        cells = trial.num_cells + 2 * MAX_DEPTH
        num_bytes = self._geometry.num_bytes(trial.rows, self._geometry.capacity_for(cells))
        return cells <= max_cells and num_bytes <= budget_bytes


def measure(
    runner: Runs,
    vocab_size: int,
    max_rows: int,
    max_cells: int,
    budget_bytes: int,
    *,
    clock: Clock = time.perf_counter,
) -> Measured | None:
    """The costs of steps with up to `max_rows` rows; None where not even one row of a modest length fits."""
    watch = Stopwatch(runner, vocab_size, clock)
    first, second = (
        [trial for trial in trials if watch.fits(trial, max_cells, budget_bytes)]
        for trials in _trials(max_rows, runner.has_head, TRACED_WIDTHS if runner.compiles else WIDTHS)
    )
    if Trial(1, 1) not in first:
        return None
    try:
        for trials, measure in product((first, second), (watch.run, watch.settle)):
            for trial in trials:
                if trials is second and watch.is_late(BUDGET_S):
                    break
                measure(trial)
    finally:
        runner.reset()
    return _measured(watch.best)


def reach(max_rows: int) -> int:
    """How many rows `measure` gets to, time and memory permitting: a small engine's table says less."""
    return max(count for count in ROW_COUNTS if count <= max_rows)


def still_holds(runner: Runs, vocab_size: int, kept: Measured, *, clock: Clock = time.perf_counter) -> bool:
    """Whether a width still costs, beside a plain step, about what it did: a table may be of a busy hour."""
    watch = Stopwatch(runner, vocab_size, clock)
    wide = 5 if runner.compiles else 4  # one of those that were measured
    try:
        for trial in (Trial(1, 1), Trial(1, wide)) * 3:
            watch.run(trial)
    finally:
        runner.reset()
    now = watch.best[Trial(1, wide)] / watch.best[Trial(1, 1)]
    table = CostTable(kept)
    then = table.step_s(StepShape(1, wide)) / table.step_s(StepShape(1, 1))
    return 1 / TOLERANCE < now / then < TOLERANCE


def _trials(max_rows: int, has_head: bool, widths: Sequence[int]) -> tuple[list[Trial], list[Trial]]:
    """What is measured before anything else, and what where time is left."""
    counts = _row_counts(max_rows)
    first, second = counts[:FIRST_COUNTS], counts[FIRST_COUNTS:]
    few, others = widths[:FIRST_COUNTS], widths[FIRST_COUNTS:]
    depths = HEAD_DEPTHS if has_head else ()

    def some(counts: list[int], widths: Sequence[int], depths: Sequence[int]) -> list[Trial]:
        return [
            trial
            for rows in counts
            for trial in (*(Trial(rows, w) for w in widths), *(Trial(rows, 1, depth) for depth in depths))
        ]

    long = [Trial(1, 1, None, MANY_CELLS)]
    some_rows = first[min(1, len(first) - 1)]
    drawn = [Trial(some_rows, 1, depth, draws=True) for depth in (None, *depths[-1:])]
    return some(first, few, depths) + drawn, long + some(second, few, depths) + some(counts, others, ())


def _row_counts(max_rows: int) -> list[int]:
    return list(dict.fromkeys(count for count in (*ROW_COUNTS, max_rows) if count <= max_rows))


def _plan(trial: Trial, geometry: CacheGeometry, vocab_size: int) -> StepPlan:
    histories = [  # each its own: rows that are alike would have the same experts
        [(7 * i + 13 * slot + 11) % vocab_size for i in range(trial.num_cells + trial.width)]
        for slot in range(trial.rows)
    ]
    params = SamplingParams(temperature=1.0 if trial.draws else 0, seed=0)
    rows = tuple(
        RowPlan(
            sequence_id=slot,
            slot=slot,
            start=trial.num_cells,
            token_ids=history[trial.num_cells :],
            num_drafts=trial.width - 1,
            next_id=None,
            feeds_head=trial.depth is not None,
            num_drafts_next=trial.depth or 0,
            params=params,
            history=history[: trial.num_cells + 1],
            num_prompt=1,
        )
        for slot, history in enumerate(histories)
    )
    capacity = geometry.capacity_for(trial.num_cells + 2 * MAX_DEPTH)
    return StepPlan(trial.rows, capacity, (), (rows,))


def _measured(best: Mapping[Trial, float]) -> Measured:
    trunk = {(t.rows, t.width): s for t, s in best.items() if t == Trial(t.rows, t.width)}
    head = {}
    for rows in sorted({t.rows for t in best if t.depth is not None}):
        fed, deepest = (best.get(Trial(rows, 1, depth)) for depth in HEAD_DEPTHS)
        if fed is not None and deepest is not None and (rows, 1) in trunk:
            head[rows] = _head_cost(trunk[rows, 1], fed, deepest)
    long = best.get(Trial(1, 1, None, MANY_CELLS))
    cell_s = 0.0 if long is None else max(0.0, long - trunk[1, 1]) / (MANY_CELLS - NUM_CELLS)
    drawn = {t: s - best[replace(t, draws=False)] for t, s in best.items() if t.draws}
    draw_s = max((max(0.0, s) / t.rows for t, s in drawn.items() if t.depth is None), default=0.0)
    by_heads = (s / t.rows - draw_s for t, s in drawn.items() if t.depth is not None)
    return Measured(trunk, head, NUM_CELLS, cell_s, draw_s, max([0.0, *by_heads]) / MAX_DEPTH)


def _head_cost(plain_s: float, fed_s: float, deepest_s: float) -> HeadCost:
    """Feeding is a small difference of long times, so it is kept within what it can be: a part of a draft.

    A draft is a pass and a projection onto the vocabulary; the first one's pass is the feeding.
    """
    each = max(0.0, deepest_s - min(fed_s, plain_s)) / MAX_DEPTH
    feed = min(0.6 * each, max(0.1 * each, fed_s - plain_s))
    return HeadCost(feed, each - feed, each)
