"""Verification: target tokens for every picking row of a batch, and how many of its drafts stand.

All array expressions: nothing here reads a result. Must not know caches or heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from outrider.models.trunk import Trunk
from outrider.sampling.logprobs import LogprobArrays, compute_logprobs
from outrider.sampling.sampler import pick
from outrider.step.input_batch import Batch, InputBatch
from outrider.step.sampling_batch import SamplingBatch, most_picks, picking_rows


@dataclass(frozen=True)
class Picks:
    """What the picking rows of a batch gain. Column 0 of a row is the token after its last committed one."""

    rows: list[int]  # indices into the batch, [picking]
    targets: mx.array  # [picking, 1 + most drafts]
    num_accepted: mx.array  # [picking]
    is_sound: mx.array  # [picking, 1 + most drafts] whether the model gave the target a finite logit
    logprobs: LogprobArrays | None  # for the rows that ask

    def arrays(self) -> Iterator[mx.array]:
        yield from (self.targets, self.num_accepted, self.is_sound)
        if self.logprobs is not None:
            yield from self.logprobs.arrays

    def last_ids(self) -> mx.array:
        """The last token that each row has picked.  [picking]"""
        return mx.take_along_axis(self.targets, self.num_accepted[:, None], axis=1)[:, 0]


def verify(
    trunk: Trunk, hidden: mx.array, batch: Batch, inputs: InputBatch, sampling: SamplingBatch
) -> Picks | None:
    """Pick at each picking row's last committed token and at its drafts; None if no row picks.

    hidden [rows, width, H]
    """
    index = picking_rows(batch)
    if not index:
        return None
    rows = [batch[i] for i in index]
    num_picks = most_picks(batch)
    first = np.array([row.first_pick for row in rows], np.int32)[:, None]
    starts, num_drafts, token_ids = inputs.starts, inputs.num_drafts, inputs.token_ids
    if len(rows) < len(batch):
        some = mx.array(index)
        hidden, token_ids = hidden[some], token_ids[some]
        starts, num_drafts = starts[some], num_drafts[some]
    if num_picks < hidden.shape[1] or first.any():
        columns = mx.array(np.minimum(first + np.arange(num_picks), hidden.shape[1] - 1).astype(np.int32))
        hidden = mx.take_along_axis(hidden, columns[..., None], axis=1)
        token_ids = mx.take_along_axis(token_ids, columns, axis=1)
    logits = trunk.logits(hidden)  # [picking, num_picks, vocab]
    positions = starts[:, None] + mx.array(first + np.arange(1, num_picks + 1, dtype=np.int32))
    scores = logits if sampling.processors is None else sampling.processors.apply(logits)
    scores = scores if sampling.masks is None else sampling.masks.apply(scores)
    targets = pick(scores, positions, sampling.targets)
    chosen = mx.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return Picks(
        rows=index,
        targets=targets,
        num_accepted=count_accepted(targets, token_ids[:, 1:], num_drafts, positions[:, :-1]),
        is_sound=mx.isfinite(chosen),
        logprobs=None if sampling.logprobs is None else compute_logprobs(logits, targets, sampling.logprobs),
    )


def count_accepted(
    targets: mx.array, drafts: mx.array, num_drafts: mx.array, positions: mx.array
) -> mx.array:
    """How many leading drafts of each row equal their targets.  [rows]

    targets [rows, n + 1], drafts [rows, n] at these positions, of which the first num_drafts [rows] are some
    """
    num = drafts.shape[1]
    if num == 0:
        return mx.zeros_like(num_drafts)
    is_right = (targets[:, :-1] == drafts) & (mx.arange(num) < num_drafts[:, None])
    return mx.cumprod(is_right.astype(mx.int32), axis=1).sum(axis=1)


def kept_tokens(inputs: InputBatch, picks: Picks | None) -> mx.array:
    """How many of the tokens that each row fed stand: the committed ones and the accepted drafts.  [rows]"""
    committed = inputs.num_fed - inputs.num_drafts
    if picks is None:
        return committed
    if len(picks.rows) == committed.shape[0]:
        return committed + picks.num_accepted
    return committed.at[mx.array(picks.rows)].add(picks.num_accepted)


def next_tokens(batch: Batch, inputs: InputBatch, picks: Picks | None) -> mx.array:
    """For every fed cell the token after it.  [rows, width]"""
    num_rows, width = inputs.token_ids.shape
    known = mx.concatenate([inputs.token_ids[:, 1:], mx.zeros((num_rows, 1), mx.int32)], axis=1)
    reading = [(i, row.num_fed - 1, row.next_id) for i, row in enumerate(batch) if row.next_id is not None]
    if reading:
        rows, lasts, ids = (mx.array(values) for values in zip(*reading, strict=True))
        known[rows, lasts] = ids
    if picks is None:
        return known
    # A picking row's targets stand at columns first_pick .. first_pick + num_drafts.
    num_picks = picks.targets.shape[1]
    first = np.array([batch[i].first_pick for i in picks.rows], np.int32)[:, None]
    if not first.any() and len(picks.rows) == num_rows:
        return mx.concatenate([picks.targets, known[:, num_picks:]], axis=1)
    columns = np.minimum(first + np.arange(num_picks, dtype=np.int32), width)
    wide = mx.concatenate([known, mx.zeros((num_rows, 1), mx.int32)], axis=1)
    wide[mx.array(picks.rows)[:, None], mx.array(columns)] = picks.targets  # past the end: dropped below
    return wide[:, :width]
