"""Verification: the target tokens of every sampling row, and how many of its drafts are accepted.

Array expressions: nothing reads a result, except a sampler that checks its candidates (sampling/sampler.py).
Must not know caches.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from outrider.models.divided_output import DividedOutput
from outrider.models.trunk import Trunk
from outrider.plan import RowPlan
from outrider.sampling.custom_processors import CustomProcessors, RowError
from outrider.sampling.logits_processors import LogitsProcessors
from outrider.sampling.logprobs import LogprobArrays, LogprobRequest, compute_logprobs
from outrider.sampling.masks import Masks
from outrider.sampling.sampler import Sampler
from outrider.step.batch import NO_TOKEN, Batch, InputBatch


def sampling_rows(batch: Batch) -> list[int]:
    return [i for i, row in enumerate(batch) if row.is_sampling]


def max_targets(batch: Batch) -> int:
    """Target tokens of a row, at most: one after its last committed token and one after each draft."""
    return 1 + max((row.num_drafts for row in batch if row.is_sampling), default=0)


@dataclass(frozen=True)
class RaggedTargets:
    """Where the targets of rows with different numbers of drafts are: padding needs no logits."""

    index: mx.array  # [targets] among those of all rows, padding included: row by row
    restore: mx.array  # [rows, most targets] the number of each one among the targets; 0 for padding

    @classmethod
    def of(cls, nums: Sequence[int]) -> RaggedTargets:
        """`nums`: targets of each row."""
        most = max(nums)
        index = [row * most + place for row, num in enumerate(nums) for place in range(num)]
        firsts = accumulate(nums, initial=0)
        restore = [
            [first + place if place < num else 0 for place in range(most)]
            for first, num in zip(firsts, nums, strict=False)
        ]
        return cls(mx.array(index), mx.array(restore))

    def taken_from(self, array: mx.array) -> mx.array:
        """[rows, most targets, ...] -> [targets, 1, ...]"""
        return array.flatten(0, 1)[self.index][:, None]

    def put_back(self, array: mx.array) -> mx.array:
        """[targets, 1] -> [rows, most targets]"""
        return array[:, 0][self.restore]


@dataclass(frozen=True)
class SamplingBatch:
    """How the logits of a batch become tokens: processors, grammar masks, logprobs, samplers.

    Everything that differs from request to request, or from step to step, is in arrays that the host has
    made. So one trace serves all batches with the same `key`. (`custom`: functions of the user, which run on
    the host. A batch with some is not traced.)
    """

    target_sampler: Sampler  # of the sampling rows, as are the next three
    processors: LogitsProcessors | None
    masks: Masks | None
    logprobs: LogprobRequest | None
    draft_sampler: Sampler  # of the rows that the head follows
    ragged: RaggedTargets | None = None  # then the target sampler's rows are single targets
    custom: CustomProcessors | None = None

    @classmethod
    def of(
        cls, batch: Batch, drafting: Sequence[int], num_targets: int, vocab: int, for_trace: bool = False
    ) -> SamplingBatch:
        """`for_trace`: more work for some rows, so that more batches have the same key."""
        sampling = sampling_rows(batch)
        rows = [batch[i] for i in sampling]
        targets = drafts = Sampler.of([row.params for row in rows], for_trace)
        if list(drafting) != sampling:
            drafts = Sampler.of([batch[i].params for i in drafting], for_trace)
        processors, masks, logprobs = None, None, None
        if any(row.changes_logits for row in rows):
            processors = LogitsProcessors.of(rows, num_targets, vocab, for_trace)
        custom = CustomProcessors.of(rows)
        if any(row.masks is not None for row in rows):
            masks = Masks.of(rows, num_targets, for_trace)
        if any(row.params.logprobs is not None for row in rows):
            logprobs = LogprobRequest.of(rows, vocab, for_trace)
        ragged = None
        nums = [1 + row.num_drafts for row in rows]
        if len(set(nums)) > 1 and not for_trace and processors is masks is logprobs is custom is None:
            ragged = RaggedTargets.of(nums)
            of_targets = [row.params for row, num in zip(rows, nums, strict=True) for _ in range(num)]
            targets = Sampler.of(of_targets)
        return cls(targets, processors, masks, logprobs, drafts, ragged, custom)

    @property
    def key(self) -> Hashable:
        parts = (self.target_sampler, self.processors, self.masks, self.logprobs, self.draft_sampler)
        return tuple(None if part is None else part.key for part in parts)

    @property
    def arrays(self) -> dict[str, Any]:
        named: dict[str, Any] = {"targets": self.target_sampler.arrays, "drafts": self.draft_sampler.arrays}
        if self.processors is not None:
            named["processors"] = self.processors.arrays
        if self.masks is not None:
            named["masks"] = self.masks.words
        return named

    def with_arrays(self, arrays: Mapping[str, Any]) -> SamplingBatch:
        return replace(
            self,
            target_sampler=self.target_sampler.with_arrays(arrays["targets"]),
            processors=None if self.processors is None else LogitsProcessors(**arrays["processors"]),
            masks=None if self.masks is None else replace(self.masks, words=arrays["masks"]),
            draft_sampler=self.draft_sampler.with_arrays(arrays["drafts"]),
        )

    def without_arrays(self) -> SamplingBatch:
        """For a trace, which gets other arrays at each call and must not hold these."""
        empty = mx.array(0)
        return self.with_arrays(tree_map(lambda _: empty, self.arrays))


@dataclass(frozen=True)
class VerifyOutput:
    """The result of the sampling rows. Column 0 of a row is the token after its last committed one."""

    rows: list[int]  # [sampling] indices into the batch
    targets: mx.array  # [sampling, 1 + most drafts]
    num_accepted: mx.array  # [sampling]
    statuses: mx.array  # [sampling, 1 + most drafts] SAMPLED, NOT_FINITE or NO_TOKEN
    logprobs: LogprobArrays | None
    errors: Mapping[int, RowError] = field(default_factory=dict)  # of custom processors, by sampling row

    def last_ids(self) -> mx.array:
        """The last token that each row has sampled: its bonus token.  [sampling]"""
        return mx.take_along_axis(self.targets, self.num_accepted[:, None], axis=1)[:, 0]


def verify(
    trunk: Trunk,
    hidden: mx.array,
    batch: Batch,
    inputs: InputBatch,
    sampling: SamplingBatch,
    divided: DividedOutput | None = None,
) -> VerifyOutput | None:
    """Sample at each row's last committed token and at its drafts; None if no row samples.

    hidden [rows, width, H]. `divided`: the output projection of a model on several ranks.
    """
    index = sampling_rows(batch)
    if not index:
        return None
    rows = [batch[i] for i in index]
    num_targets = max_targets(batch)
    first = [row.first_target for row in rows]
    starts, num_drafts, token_ids = inputs.starts, inputs.num_drafts, inputs.token_ids
    if len(rows) < len(batch):
        chosen = mx.array(index)
        hidden, token_ids = hidden[chosen], token_ids[chosen]
        starts, num_drafts = starts[chosen], num_drafts[chosen]
    if num_targets < hidden.shape[1] or any(first):
        columns = _columns(first, num_targets, hidden.shape[1])
        hidden = mx.take_along_axis(hidden, columns[..., None], axis=1)
        token_ids = mx.take_along_axis(token_ids, columns, axis=1)
    positions = starts[:, None] + mx.array([[one + 1 + i for i in range(num_targets)] for one in first])
    ragged, own_positions = sampling.ragged, positions
    if ragged is not None:
        own_positions = ragged.taken_from(positions)
    if divided is None:
        logits = trunk.logits(hidden if ragged is None else ragged.taken_from(hidden))
    else:
        logits = _divided_logits(divided, hidden, rows, is_ragged=ragged is not None)
    # [sampling, num_targets, vocab]; ragged: [targets, 1, vocab]
    scores = logits if sampling.processors is None else sampling.processors.apply(logits)
    errors: Mapping[int, RowError] = {}
    if sampling.custom is not None:
        scores, errors = sampling.custom.apply(scores)
    scores = scores if sampling.masks is None else sampling.masks.apply(scores)
    targets = sampling.target_sampler.sample(scores, own_positions)
    logprobs = None
    if sampling.logprobs is not None:
        logprobs = compute_logprobs(logits, targets, sampling.logprobs)
    statuses = _statuses(logits, scores, targets)
    if ragged is not None:
        targets, statuses = ragged.put_back(targets), ragged.put_back(statuses)
    return VerifyOutput(
        rows=index,
        targets=targets,
        num_accepted=count_accepted(targets, token_ids[:, 1:], num_drafts, positions[:, :-1]),
        statuses=statuses,
        logprobs=logprobs,
        errors=errors,
    )


def _columns(first: Sequence[int], num_targets: int, width: int) -> mx.array:
    """Where the rows' targets are.  first [sampling] -> [sampling, num_targets]"""
    return mx.array([[min(one + i, width - 1) for i in range(num_targets)] for one in first])


def _divided_logits(
    divided: DividedOutput, hidden: mx.array, rows: Sequence[RowPlan], is_ragged: bool
) -> mx.array:
    """Without padding, as the other ranks compute them.  hidden [sampling, num_targets, H]"""
    targets = RaggedTargets.of([1 + row.num_drafts for row in rows])
    logits = divided(targets.taken_from(hidden))
    return logits if is_ragged else logits[:, 0][targets.restore]


def join_logits(divided: DividedOutput, hidden: mx.array, batch: Batch) -> None:
    """Compute this rank's part of the logits that rank 0 verifies with.  hidden [rows, width, H]"""
    rows = [batch[i] for i in sampling_rows(batch)]
    if not rows:
        return
    first = [row.first_target for row in rows]
    columns = _columns(first, max_targets(batch), hidden.shape[1])
    at_targets = mx.take_along_axis(hidden[mx.array(sampling_rows(batch))], columns[..., None], axis=1)
    _divided_logits(divided, at_targets, rows, is_ragged=True)


def _statuses(logits: mx.array, scores: mx.array, targets: mx.array) -> mx.array:
    """logits and scores [rows, width, vocab], targets [rows, width] -> [rows, width]"""
    places = targets[..., None]
    is_finite = mx.abs(mx.take_along_axis(logits, places, axis=-1)[..., 0]) < mx.inf  # not so NaN
    if scores is logits:
        return is_finite.astype(mx.int32)
    is_excluded = mx.take_along_axis(scores, places, axis=-1)[..., 0] == -mx.inf
    return mx.where(is_finite & is_excluded, NO_TOKEN, is_finite.astype(mx.int32))


def count_accepted(
    targets: mx.array, drafts: mx.array, num_drafts: mx.array, positions: mx.array
) -> mx.array:
    """A draft is accepted if it and all drafts before it equal their targets. How many are, by row.  [rows]

    targets [rows, n + 1], drafts [rows, n], of which the first num_drafts [rows] count. `positions` [rows, n]
    are the drafts' positions: the GPU benchmark replaces this function by one that accepts by position.
    """
    num = drafts.shape[1]
    if num == 0:
        return mx.zeros_like(num_drafts)
    is_right = (targets[:, :-1] == drafts) & (mx.arange(num) < num_drafts[:, None])
    return mx.cumprod(is_right.astype(mx.int32), axis=1).sum(axis=1)


def num_committed_tokens(inputs: InputBatch, verified: VerifyOutput | None) -> mx.array:
    """Fed tokens of each row that are committed after the pass: all but the rejected drafts.  [rows]"""
    committed = inputs.num_fed - inputs.num_drafts
    if verified is None:
        return committed
    if len(verified.rows) == committed.shape[0]:
        return committed + verified.num_accepted
    return committed.at[mx.array(verified.rows)].add(verified.num_accepted)


def next_tokens(batch: Batch, inputs: InputBatch, verified: VerifyOutput | None) -> mx.array:
    """The token after each fed cell, which the head is fed with that cell's hidden state.  [rows, width]"""
    num_rows, width = inputs.token_ids.shape
    first = [] if verified is None else [batch[i].first_target for i in verified.rows]
    if verified is not None and verified.targets.shape == (num_rows, width) and not any(first):
        return verified.targets  # all rows decode, and one of them is as wide as the pass
    known = mx.concatenate([inputs.token_ids[:, 1:], mx.zeros((num_rows, 1), mx.int32)], axis=1)
    prefill = [(i, row.num_fed - 1, row.next_id) for i, row in enumerate(batch) if row.next_id is not None]
    if prefill:
        rows, lasts, ids = (mx.array(values) for values in zip(*prefill, strict=True))
        known[rows, lasts] = ids
    if verified is None:
        return known
    # A sampling row's targets go to columns first_target .. first_target + num_drafts.
    num_targets = verified.targets.shape[1]
    if len(verified.rows) == num_rows and not any(first):
        return mx.concatenate([verified.targets, known[:, num_targets:]], axis=1)
    columns = _columns(first, num_targets, width + 1)
    wide = mx.concatenate([known, mx.zeros((num_rows, 1), mx.int32)], axis=1)
    wide[mx.array(verified.rows)[:, None], columns] = verified.targets
    return wide[:, :width]  # the column past the end took the targets that have no cell
