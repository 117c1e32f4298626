"""The runner: turns a StepPlan into a StepResult. The only code that runs the model.

For each batch of a plan, all on the device and read back once:

    trunk   [rows, width] tokens -> hidden states
    targets for each picking row, at its last committed token and at each draft: edits, then pick
    accept  drafts while they equal the targets; kept = committed + accepted
    head    feed the pairs (hidden, next token), recurse for the next drafts
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from outrider.cache.ragged_kv import Placement, RaggedKV
from outrider.config import CacheGeometry
from outrider.models.heads import LoadedHead
from outrider.models.trunk import Trunk, TrunkCache
from outrider.plan import RowPlan, RowResult, StepPlan, StepResult
from outrider.sampling.edits import apply_edits
from outrider.sampling.logprobs import LogprobArrays, compute_logprobs, read_logprobs
from outrider.sampling.masks import apply_masks
from outrider.sampling.picking import pick
from outrider.speculate.mtp import HeadRows, MTPDrafter

Batch = Sequence[RowPlan]


@dataclass(frozen=True)
class _Launched:
    """A batch under way: arrays that the device will fill. Picking rows are a part of the batch's rows."""

    batch: Batch
    picking: list[int]  # indices into batch
    targets: mx.array | None = None  # [picking, width]
    num_accepted: mx.array | None = None  # [picking]
    logprobs: LogprobArrays | None = None
    heading: Sequence[int] = ()  # indices into batch
    drafts: mx.array | None = None  # [heading, depth]

    def arrays(self) -> Iterator[mx.array]:
        yield from (x for x in (self.targets, self.num_accepted, self.drafts) if x is not None)
        if self.logprobs is not None:
            yield from self.logprobs.arrays


class Runner:
    """Owns the caches of one model and runs steps on them."""

    def __init__(self, trunk: Trunk, head: LoadedHead | None = None) -> None:
        self._trunk = trunk
        self._drafter = MTPDrafter(head, trunk) if head is not None else None
        self._cache = TrunkCache(trunk.layout)
        self._shape = (0, 0)  # slots, capacity

    @property
    def has_head(self) -> bool:
        return self._drafter is not None

    @property
    def num_bytes(self) -> int:
        """Bytes that the caches hold now."""
        return sum(kv.num_bytes for kv in self._buffers())

    def geometry(self, page_size: int) -> CacheGeometry:
        per_cell = sum(kv.spec.bytes_per_cell for kv in self._buffers())
        return CacheGeometry(bytes_per_cell=per_cell, page_size=page_size)

    def run(self, plan: StepPlan) -> StepResult:
        self._arrange(plan)
        launched = [self._launch(batch) for batch in plan.batches]
        mx.eval([x for one in launched for x in one.arrays()], self._cache_arrays())
        return StepResult(tuple(row for one in launched for row in _collect(one)))

    def reset(self) -> None:
        """Drop all cells, after a step that failed half-way."""
        for kv in self._buffers():
            kv.resize(0, 0)
        self._shape = (0, 0)

    def _buffers(self) -> Iterator[RaggedKV]:
        yield from self._cache.buffers()
        if self._drafter is not None:
            yield self._drafter.kv

    def _cache_arrays(self) -> list[mx.array]:
        return [array for kv in self._buffers() for array in (kv.keys, kv.values)]

    def _arrange(self, plan: StepPlan) -> None:
        for move in plan.moves:
            for kv in self._buffers():
                kv.exchange(move.source, move.target, move.one_way)
        self._resize(plan.num_slots, plan.capacity)

    def _resize(self, num_slots: int, capacity: int) -> None:
        if (num_slots, capacity) != self._shape:
            for kv in self._buffers():
                kv.resize(num_slots, capacity)
            self._shape = (num_slots, capacity)

    def _launch(self, batch: Batch) -> _Launched:
        width = max(row.num_fed for row in batch)
        token_ids = mx.array([[*row.token_ids, *([0] * (width - row.num_fed))] for row in batch])
        starts = mx.array([row.start for row in batch])
        num_fed = mx.array([row.num_fed for row in batch])
        end = max(row.start + row.num_fed for row in batch)
        slots = [row.slot for row in batch]
        place = Placement(slots, starts, num_fed, width, end, self._shape[1])
        hidden = self._trunk.hidden(token_ids, self._cache, place)

        picking = [i for i, row in enumerate(batch) if row.picks]
        targets = num_accepted = logprobs = None
        if picking:
            targets, num_accepted, logprobs = self._verify(hidden, [batch[i] for i in picking], picking)
        launched = _Launched(batch, picking, targets, num_accepted, logprobs)
        return self._draft(launched, hidden)

    def _verify(
        self, hidden: mx.array, rows: Batch, index: list[int]
    ) -> tuple[mx.array, mx.array, LogprobArrays | None]:
        """Targets [rows, 1 + most drafts], accepted drafts [rows], log-probabilities for those who ask."""
        num_picks = 1 + max(row.num_drafts for row in rows)
        if len(index) < hidden.shape[0]:
            hidden = hidden[mx.array(index)]
        first = np.array([row.first_pick for row in rows], np.int32)[:, None]
        if num_picks < hidden.shape[1] or first.any():
            columns = np.minimum(first + np.arange(num_picks), hidden.shape[1] - 1).astype(np.int32)
            hidden = mx.take_along_axis(hidden, mx.array(columns)[..., None], axis=1)
        logits = self._trunk.logits(hidden)  # [rows, num_picks, vocab]
        starts = np.array([row.start for row in rows], np.int32)[:, None]
        positions = mx.array(starts + first + np.arange(1, num_picks + 1, dtype=np.int32))
        scores = apply_masks(apply_edits(logits, rows), rows)
        targets = pick(scores, positions, [row.params for row in rows])
        return targets, _count_accepted(targets, rows), compute_logprobs(logits, targets, rows)

    def _draft(self, launched: _Launched, hidden: mx.array) -> _Launched:
        batch = launched.batch
        heading = [i for i, row in enumerate(batch) if row.feeds_head]
        if not heading or self._drafter is None:
            return launched
        next_ids, num_kept = _next_tokens(launched, hidden.shape[1])
        rows = [batch[i] for i in heading]
        if len(heading) < len(batch):
            index = mx.array(heading)
            hidden, next_ids, num_kept = hidden[index], next_ids[index], num_kept[index]
        head_rows = HeadRows(
            slots=[row.slot for row in rows],
            starts=mx.array([row.start for row in rows]),
            num_fed=mx.array([row.num_fed for row in rows]),
            num_kept=num_kept,
            end=max(row.start + row.num_fed for row in rows),
            params=[row.params for row in rows],
            depth=max(row.num_drafts_next for row in rows),
        )
        drafts = self._drafter.draft(hidden, next_ids, head_rows, self._shape[1])
        return _Launched(
            batch,
            launched.picking,
            launched.targets,
            launched.num_accepted,
            launched.logprobs,
            heading,
            drafts,
        )


def _count_accepted(targets: mx.array, rows: Batch) -> mx.array:
    """How many leading drafts of each row equal their targets.  [rows]"""
    most = targets.shape[1] - 1
    if most == 0:
        return mx.zeros((len(rows),), mx.int32)
    drafts = [[*row.token_ids[row.first_pick + 1 :], *([-1] * (most - row.num_drafts))] for row in rows]
    return mx.cumprod((targets[:, :-1] == mx.array(drafts)).astype(mx.int32), axis=1).sum(axis=1)


def _next_tokens(launched: _Launched, width: int) -> tuple[mx.array, mx.array]:
    """For every fed cell the token after it [rows, width], and how many cells each row keeps [rows]."""
    batch = launched.batch
    known = np.zeros((len(batch), width), np.int32)
    for i, row in enumerate(batch):
        following = [*row.token_ids[1:], row.next_id or 0]
        known[i, : row.num_fed] = following
    num_fed = np.array([row.num_fed for row in batch], np.int32)
    if launched.targets is None or launched.num_accepted is None:
        return mx.array(known), mx.array(num_fed)
    # A picking row's targets stand at columns first_pick .. first_pick + num_drafts.
    rows = np.array(launched.picking, np.int32)[:, None]
    num_picks = launched.targets.shape[1]
    first = np.array([batch[i].first_pick for i in launched.picking], np.int32)[:, None]
    columns = np.minimum(first + np.arange(num_picks, dtype=np.int32), width)  # past the end: dropped below
    wide = mx.concatenate([mx.array(known), mx.zeros((len(batch), 1), mx.int32)], axis=1)
    wide[mx.array(rows), mx.array(columns)] = launched.targets
    kept = mx.array(num_fed - np.array([row.num_drafts for row in batch], np.int32))
    kept[mx.array(launched.picking)] = kept[mx.array(launched.picking)] + launched.num_accepted
    return wide[:, :width], kept


def _collect(launched: _Launched) -> Iterator[RowResult]:
    """Read a finished batch back into plain Python."""
    batch, picking = launched.batch, launched.picking
    tokens: dict[int, tuple[int, ...]] = {}
    if launched.targets is not None and launched.num_accepted is not None:
        targets, accepted = np.array(launched.targets), np.array(launched.num_accepted)
        tokens = {i: tuple(targets[j, : accepted[j] + 1].tolist()) for j, i in enumerate(picking)}
    logprobs = read_logprobs(
        launched.logprobs, [batch[i] for i in picking], [tokens.get(i, ()) for i in picking]
    )
    drafts: dict[int, list[int]] = {}
    if launched.drafts is not None:
        drafts = dict(zip(launched.heading, np.array(launched.drafts).tolist(), strict=True))
    place = {i: j for j, i in enumerate(picking)}
    for i, row in enumerate(batch):
        yield RowResult(
            row.sequence_id,
            tokens.get(i, ()),
            tuple(drafts.get(i, ())[: row.num_drafts_next]),
            logprobs.get(place[i], ()) if i in place else (),
        )
