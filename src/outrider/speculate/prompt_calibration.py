"""Measures what prompt chunks cost: runs synthetic chunks of several sizes through the runner.

Sizes grow until a chunk would take longer than `MAX_CHUNK_S`. So no size is measured, and later chosen, that
would keep new requests waiting for long. A second chunk behind many cells shows what a cell costs. All are
timed once, then all again, and the shortest times count: other processes only ever add time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from outrider.plan import CacheGeometry, RowPlan, StepPlan, StepRunner
from outrider.request import MAX_DEPTH, SamplingParams
from outrider.speculate import calibration
from outrider.speculate.prompt_costs import MeasuredPromptCosts

SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)  # tokens; mlx-lm's chunk is 2,048
MAX_CHUNK_S = 1.0  # seconds that a new request may wait for a chunk of another; chosen by hand
MAX_RUNS = 3  # times that one size is timed; chosen by hand
SHORT_S = 0.1  # a chunk that takes less is timed again; chosen by hand
BUDGET_SHARE = 0.4  # of calibration.BUDGET_S, in addition to it; chosen by hand
ExtraBytes = Callable[[Callable[[], None]], int]
MANY_CELLS = 1024  # cells before the chunk that shows the cost of a cell; chosen by hand


def measure_prompts(
    runner: StepRunner,
    vocab_size: int,
    max_cells: int,
    budget_bytes: int,
    *,
    clock: calibration.Clock = time.perf_counter,
    extra_bytes: ExtraBytes = lambda run: 0,
) -> MeasuredPromptCosts | None:
    """The costs of chunks of up to 2,048 tokens. None if not even the smallest chunk fits.

    `extra_bytes`: runs a function and returns how much memory it takes meanwhile.
    """
    timer = _ChunkTimer(runner, vocab_size, max_cells, budget_bytes, clock)
    pass_s: dict[int, float] = {}
    pair_s = token_bytes = pair_bytes = 0.0
    try:
        for size in SIZES:
            last = max(pass_s, default=0)
            if not timer.fits(size, 0) or (last and pass_s[last] * size / last > MAX_CHUNK_S):
                break
            if len(pass_s) >= 2 and timer.is_out_of_time():
                break
            pass_s[size] = timer.shortest_s(size, 0)
        size = max((size for size in pass_s if size <= MANY_CELLS // 8), default=0)
        if size:
            num_bytes = timer.num_bytes(size, 0, extra_bytes)
            token_bytes = num_bytes / size
        long_s = None
        if size and timer.fits(size, MANY_CELLS):
            long_s = timer.shortest_s(size, MANY_CELLS)
            more_bytes = timer.num_bytes(size, MANY_CELLS, extra_bytes) - num_bytes
            pair_bytes = max(0, more_bytes) / (size * MANY_CELLS)
        for again in pass_s:
            if not timer.is_out_of_time():
                pass_s[again] = min(pass_s[again], timer.shortest_s(again, 0))
        if long_s is not None:
            if not timer.is_out_of_time():
                long_s = min(long_s, timer.shortest_s(size, MANY_CELLS))
            pair_s = max(0.0, long_s - pass_s[size]) / (size * MANY_CELLS)
    finally:
        runner.reset()
    return MeasuredPromptCosts(pass_s, pair_s, token_bytes, pair_bytes) if pass_s else None


class _ChunkTimer:
    """Runs synthetic chunks and measures their times."""

    def __init__(
        self,
        runner: StepRunner,
        vocab_size: int,
        max_cells: int,
        budget_bytes: int,
        clock: calibration.Clock,
    ) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._max_cells = max_cells
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._geometry = runner.geometry(256)
        self._cache_shape = (0, 0)  # cells of a slot and blocks of the runner's caches
        self._end_s = clock() + BUDGET_SHARE * calibration.BUDGET_S

    def is_out_of_time(self) -> bool:
        return self._clock() > self._end_s

    def fits(self, size: int, start: int) -> bool:
        num_cells = start + size + 2 * MAX_DEPTH
        num_bytes = calibration.cache_bytes(self._geometry, 1, num_cells)
        return num_cells <= self._max_cells and num_bytes <= self._budget_bytes

    def shortest_s(self, size: int, start: int) -> float:
        """Seconds of a chunk behind `start` cells. The first run of a size may compile or grow memory."""
        plan = self._plan(size, start)
        if self._runner.compiles or _cache_shape(plan) != self._cache_shape:
            self._run(plan)
        shortest_s = self._timed_s(plan)
        for _ in range(1, MAX_RUNS if shortest_s < SHORT_S else 1):
            shortest_s = min(shortest_s, self._timed_s(plan))
        return max(shortest_s, 1e-6)

    def num_bytes(self, size: int, start: int, extra_bytes: ExtraBytes) -> int:
        """Memory that a chunk computes with. Its caches are made before."""
        plan = self._plan(size, start)
        if _cache_shape(plan) != self._cache_shape:
            self._run(plan)
        return extra_bytes(lambda: self._run(plan))

    def _plan(self, size: int, start: int) -> StepPlan:
        return _plan(size, start, self._runner.has_head, self._geometry, self._vocab_size)

    def _run(self, plan: StepPlan) -> None:
        self._runner.run(plan)
        self._cache_shape = _cache_shape(plan)

    def _timed_s(self, plan: StepPlan) -> float:
        start_s = self._clock()
        self._run(plan)
        return self._clock() - start_s


def _plan(size: int, start: int, has_head: bool, geometry: CacheGeometry, vocab_size: int) -> StepPlan:
    tokens = [(7 * i + 11) % vocab_size for i in range(start + size + 1)]
    row = RowPlan(
        sequence_id=0,
        slot=0,
        start=start,
        token_ids=tokens[start:-1],
        num_drafts=0,
        next_id=tokens[-1],
        feeds_head=has_head,
        num_drafts_next=0,
        params=SamplingParams(temperature=0, seed=0),
        history=tokens,
        num_prompt=len(tokens),
    )
    return calibration.step_of(geometry, start + size + 2 * MAX_DEPTH, [row])


def _cache_shape(plan: StepPlan) -> tuple[int, int]:
    return plan.capacity, plan.num_blocks
