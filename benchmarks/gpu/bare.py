"""The time that the device alone needs: a step's passes with fixed shapes, and the memory's bandwidth.

A bare step is the trunk over [rows, 1 + depth], the logits and their argmax, the commit of recurrent states,
and the head's passes for `depth` drafts. The next bare step is fed the tokens of the last one. Passes are
traced once, as the engine's passes are. Nothing is scheduled, read back or accepted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from benchmarks.gpu.weights import Subject
from outrider.cache.placement import Placement
from outrider.cache.ragged_kv import RaggedKV
from outrider.cache.recurrent import RecurrentState
from outrider.models.trunk import TrunkCache
from outrider.request import MAX_DEPTH, SamplingParams
from outrider.sampling.sampler import Sampler
from outrider.step.head_rows import HeadRows
from outrider.step.mtp import MTPDrafter

IN_A_ROW = 8  # steps that are timed together; chosen by hand
ROUNDS = 5  # at most; chosen by hand


@dataclass(frozen=True)
class BareTime:
    built_s: float  # per step, of a graph that was built before the clock started: device time and launches
    launched_s: float  # per step, built and launched one after the other, nothing read: the host's limit


class BareStep:
    def __init__(self, subject: Subject, rows: int, depth: int, num_cells: int) -> None:
        self._trunk = subject.trunk
        self._cache = TrunkCache(subject.trunk.layout)
        self._drafter = MTPDrafter(subject.head, subject.trunk) if depth else None
        self._rows, self._depth, self._start = rows, depth, num_cells
        self._capacity = -(-(num_cells + 3 * MAX_DEPTH) // 256) * 256
        self._how = Sampler.of([SamplingParams(temperature=0, seed=0)] * rows)
        self.tokens = mx.ones((rows, 1 + depth), mx.int32)
        self._traced = mx.compile(self._run)
        for buffers in self._buffers():
            buffers.resize(rows, self._capacity)
        mx.eval(self.arrays())

    def _buffers(self) -> list[RaggedKV | RecurrentState]:
        found = list(self._cache.buffers())
        return found if self._drafter is None else [*found, *self._drafter.buffers()]

    def arrays(self) -> list[mx.array]:
        return [self.tokens, *(array for buffers in self._buffers() for array in buffers.arrays())]

    def add(self) -> None:
        """Adds one step to the graph."""
        self.tokens, *caches = self._traced(self.tokens, *self.arrays()[1:])
        self._put(caches)

    def _put(self, caches: Sequence[mx.array]) -> None:
        left = iter(caches)
        for buffers in self._buffers():
            buffers.put([next(left) for _ in buffers.arrays()])

    def _run(self, tokens: mx.array, *caches: mx.array) -> list[mx.array]:
        self.tokens = tokens
        self._put(caches)
        self._step()
        return self.arrays()

    def _step(self) -> None:
        width = 1 + self._depth
        slots = list(range(self._rows))
        starts = mx.full((self._rows,), self._start)
        fed = mx.full((self._rows,), width)
        end = self._start + width
        place = Placement(
            slots, starts, fed, width, end, self._capacity, any_new=False, commits_all=self._drafter is None
        )
        hidden = self._trunk.hidden(self.tokens, self._cache, place)
        targets = mx.argmax(self._trunk.logits(hidden), axis=-1).astype(mx.int32)
        self._cache.commit(fed)
        if self._drafter is None:
            self.tokens = targets
            return
        rows = HeadRows(slots, starts, fed, fed, end, self._how, self._depth)
        drafts = self._drafter.draft(hidden, targets, rows, self._capacity)
        assert drafts is not None
        self.tokens = mx.concatenate([targets[:, -1:], drafts.token_ids.astype(mx.int32)], axis=1)


def measure_bare(subject: Subject, rows: int, depth: int, num_cells: int, seconds: float) -> BareTime:
    """Medians over as many rounds as the seconds allow."""
    step = BareStep(subject, rows, depth, num_cells)

    def built() -> float:
        for _ in range(IN_A_ROW):
            step.add()
        began = time.perf_counter()
        mx.eval(step.arrays())
        return (time.perf_counter() - began) / IN_A_ROW

    def launched() -> float:
        began = time.perf_counter()
        for _ in range(IN_A_ROW):
            step.add()
            mx.async_eval(step.arrays())
        mx.eval(step.arrays())
        return (time.perf_counter() - began) / IN_A_ROW

    return BareTime(*(_median_of(run, seconds / 2) for run in (built, launched)))


def _median_of(run: Callable[[], float], seconds: float) -> float:
    run()  # compiles
    began, found = time.perf_counter(), []
    while len(found) < ROUNDS and (len(found) < 2 or time.perf_counter() - began < seconds):
        found.append(run())
    return statistics.median(found)


def measure_bandwidth(num_bytes: int) -> dict[str, float]:
    """Bytes per second of a copy (read and written) and of a sum (read): the best of several."""
    array = mx.ones((max(1, num_bytes // 8192), 4096), mx.bfloat16)
    mx.eval(array)
    tries = {
        "copy": (lambda: array + mx.array(1, mx.bfloat16), 2),
        "sum": (lambda: mx.sum(array, axis=-1), 1),
    }
    found = {name: times * array.nbytes / _best_s(run) for name, (run, times) in tries.items()}
    mx.clear_cache()
    return found


def _best_s(run: Callable[[], mx.array], rounds: int = 6) -> float:
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        mx.eval(run())
        best = min(best, time.perf_counter() - began)
    return best


def bytes_a_step(subject: Subject, rows: int, depth: int, num_cells: int) -> int:
    """Bytes that a step must move: weights and keys once, states in and out, and the head for each draft."""
    moved = subject.bytes_read(rows * (1 + depth))
    for buffers in TrunkCache(subject.trunk.layout).buffers():
        if isinstance(buffers, RaggedKV):
            moved += rows * num_cells * buffers.spec.bytes_per_cell
        else:
            moved += 2 * rows * buffers.spec.bytes_per_slot
    return moved + depth * (subject.head_bytes_read(rows) + subject.projection_bytes)
