"""How many drafts would stand: a head measured on held-out exchanges, without running the engine.

The answers are the trunk's own greedy ones, so a draft stands where it equals the text. Whether each chain's
guesses do is found for the whole text at once; then the engine's steps are walked over it. The counts are the
engine's to the token (tests/train/test_agreement.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from outrider.models.heads import MTPHead
from outrider.models.trunk import Trunk
from outrider.train.batches import Batch, make_batch, split
from outrider.train.chain import chain_outputs
from outrider.train.exchanges import Exchange
from outrider.train.loss import LOGITS_AT_ONCE


@dataclass(frozen=True)
class Acceptance:
    """What the steps over some texts drafted, and what stood. By draft position."""

    steps: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def tokens_per_step(self) -> float:
        return 1 + sum(self.accepted) / self.steps if self.steps else 1.0

    @property
    def given_the_one_before(self) -> tuple[float, ...]:
        """How often a draft stands where those before it did."""
        reached = (self.drafted[0], *self.accepted)
        return tuple(
            stood / before if before else 0.0 for before, stood in zip(reached, self.accepted, strict=False)
        )

    def plus(self, other: Acceptance) -> Acceptance:
        def added(ours: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(a + b for a, b in zip(ours, others, strict=True))

        return Acceptance(
            self.steps + other.steps,
            added(self.drafted, other.drafted),
            added(self.accepted, other.accepted),
        )


def evaluate(
    head: MTPHead,
    trunk: Trunk,
    exchanges: Sequence[Exchange],
    depths: int,
    draft_ids: mx.array | None = None,
) -> Acceptance:
    """Over greedy answers; `draft_ids` limits what may be drafted."""
    total = Acceptance(0, (0,) * depths, (0,) * depths)
    for some in split(exchanges):
        hits = _hits(head, trunk, make_batch(some, depths), depths, draft_ids)
        for one in some:
            total = total.plus(walk(one, hits[: one.num_targets]))
            hits = hits[one.num_targets :]
    return total


def walk(exchange: Exchange, hits: np.ndarray) -> Acceptance:
    """The engine's steps over one answer.

    hits [targets, depths]: whether the guess of the answer's token 1 + i at that depth is right.
    """
    depths = hits.shape[1]
    drafted, accepted = [0] * depths, [0] * depths
    # An answer that was cut has no room for a draft of its last token: the step itself brings that one.
    last = exchange.num_targets - (0 if exchange.is_finished else 1)
    steps = pending = 0  # the answer's token that the step feeds; its drafts are for pending + 1, ...
    while pending < exchange.num_targets:
        steps += 1
        room = depths if exchange.is_finished else min(depths, last - pending)
        stood = 0
        while stood < room and pending + stood < last and hits[pending + stood, stood]:
            stood += 1
        for depth in range(room):
            drafted[depth] += 1
            accepted[depth] += depth < stood
        pending += stood + 1
    return Acceptance(steps, tuple(drafted), tuple(accepted))


def _hits(head: MTPHead, trunk: Trunk, batch: Batch, depths: int, draft_ids: mx.array | None) -> np.ndarray:
    """Whether each target's token is what each depth would draft.  [targets, depths]"""
    dtype = head.fc.weight.dtype
    hidden = trunk.inner(batch.token_ids).astype(dtype)
    guesses = batch.guesses(chain_outputs(head, hidden, trunk.embed(batch.token_ids).astype(dtype), depths))
    mx.eval(guesses)
    size = max(1, LOGITS_AT_ONCE // trunk.vocab_size)
    found = []
    for start in range(0, batch.num_targets, size):
        rows = slice(start, start + size)
        drafts = mx.stack([_drafts(trunk, guess[rows], draft_ids) for guess in guesses], axis=-1)
        found.append(np.array(drafts == batch.next_ids[rows, None]))
    return np.concatenate(found)


def _drafts(trunk: Trunk, guesses: mx.array, draft_ids: mx.array | None) -> mx.array:
    """[n, H] -> [n]"""
    logits = trunk.logits(guesses.astype(trunk.dtype)[None])[0]
    if draft_ids is None:
        return mx.argmax(logits, axis=-1)
    return draft_ids[mx.argmax(logits[:, draft_ids], axis=-1)]
