"""Verification: target tokens for every picking row of a batch, and how many of its drafts stand.

All array expressions: nothing here reads a result. Must not know caches or heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from outrider.models.trunk import Trunk
from outrider.plan import RowPlan
from outrider.sampling.edits import apply_edits
from outrider.sampling.logprobs import LogprobArrays, compute_logprobs
from outrider.sampling.masks import apply_masks
from outrider.sampling.picking import pick

Batch = Sequence[RowPlan]


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


def verify(trunk: Trunk, hidden: mx.array, batch: Batch) -> Picks | None:
    """Pick at each picking row's last committed token and at its drafts; None if no row picks.

    hidden [rows, width, H]
    """
    index = [i for i, row in enumerate(batch) if row.picks]
    if not index:
        return None
    rows = [batch[i] for i in index]
    num_picks = 1 + max(row.num_drafts for row in rows)
    first = np.array([row.first_pick for row in rows], np.int32)[:, None]
    if len(rows) < len(batch):
        hidden = hidden[mx.array(index)]
    if num_picks < hidden.shape[1] or first.any():
        columns = np.minimum(first + np.arange(num_picks), hidden.shape[1] - 1).astype(np.int32)
        hidden = mx.take_along_axis(hidden, mx.array(columns)[..., None], axis=1)
    logits = trunk.logits(hidden)  # [picking, num_picks, vocab]
    starts = np.array([row.start for row in rows], np.int32)[:, None]
    positions = mx.array(starts + first + np.arange(1, num_picks + 1, dtype=np.int32))
    scores = apply_masks(apply_edits(logits, rows), rows)
    targets = pick(scores, positions, [row.params for row in rows])
    chosen = mx.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return Picks(
        rows=index,
        targets=targets,
        num_accepted=_num_accepted(targets, rows, positions),
        is_sound=mx.isfinite(chosen),
        logprobs=compute_logprobs(logits, targets, rows),
    )


def kept_tokens(batch: Batch, picks: Picks | None) -> mx.array:
    """How many of the tokens that each row fed stand: the committed ones and the accepted drafts.  [rows]"""
    committed = mx.array([row.num_fed - row.num_drafts for row in batch])
    if picks is not None:
        index = mx.array(picks.rows)
        committed[index] = committed[index] + picks.num_accepted
    return committed


def next_tokens(batch: Batch, picks: Picks | None, width: int) -> mx.array:
    """For every fed cell the token after it.  [rows, width]"""
    known = np.zeros((len(batch), width), np.int32)
    for i, row in enumerate(batch):
        known[i, : row.num_fed] = [*row.token_ids[1:], row.next_id or 0]
    if picks is None:
        return mx.array(known)
    # A picking row's targets stand at columns first_pick .. first_pick + num_drafts.
    index = mx.array(picks.rows)
    first = np.array([batch[i].first_pick for i in picks.rows], np.int32)[:, None]
    columns = np.minimum(first + np.arange(picks.targets.shape[1], dtype=np.int32), width)
    wide = mx.concatenate([mx.array(known), mx.zeros((len(batch), 1), mx.int32)], axis=1)
    wide[index[:, None], mx.array(columns)] = picks.targets  # past the end: into the column dropped below
    return wide[:, :width]


def count_accepted(
    targets: mx.array, drafts: mx.array, num_drafts: mx.array, positions: mx.array
) -> mx.array:
    """How many leading drafts of each row equal their targets.  [rows]

    targets [rows, n + 1], drafts [rows, n], num_drafts [rows]; positions [rows, n] are those of the drafts.
    """
    is_draft = mx.arange(drafts.shape[1]) < num_drafts[:, None]
    is_right = (targets[:, :-1] == drafts) & is_draft
    return mx.cumprod(is_right.astype(mx.int32), axis=1).sum(axis=1)


def _num_accepted(targets: mx.array, rows: Batch, positions: mx.array) -> mx.array:
    most = targets.shape[1] - 1
    if most == 0:
        return mx.zeros((len(rows),), mx.int32)
    drafts = [[*row.token_ids[row.first_pick + 1 :], *([-1] * (most - row.num_drafts))] for row in rows]
    num_drafts = mx.array([row.num_drafts for row in rows])
    return count_accepted(targets, mx.array(drafts), num_drafts, positions[:, :-1])
