"""How many drafts of a head would be accepted, measured on held-out exchanges without running the engine.

The answers are the trunk's own greedy answers, so a draft is accepted if it equals the text. One pass
compares the guesses of all chains with the text; then the engine's steps over the text are simulated. The
counts equal the engine's counts exactly (tests/train/test_trained_head.py).
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
from outrider.train.loss import MAX_LOGITS


@dataclass(frozen=True)
class Acceptance:
    """Drafted and accepted tokens of some steps, by draft position."""

    steps: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def tokens_per_step(self) -> float:
        return 1 + sum(self.accepted) / self.steps if self.steps else 1.0

    @property
    def acceptance_rates(self) -> tuple[float, ...]:
        """By position: how often a draft is accepted when all drafts before it were accepted."""
        reached = (self.drafted[0], *self.accepted)
        return tuple(
            taken / before if before else 0.0 for before, taken in zip(reached, self.accepted, strict=False)
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
    """The exchanges must have greedy answers. `draft_ids`: the token ids that may be drafted; None: all."""
    total = Acceptance(0, (0,) * depths, (0,) * depths)
    for some in split(exchanges):
        hits = _hits(head, trunk, make_batch(some, depths), depths, draft_ids)
        for one in some:
            total = total.plus(simulate_steps(one, hits[: one.num_targets]))
            hits = hits[one.num_targets :]
    return total


def simulate_steps(exchange: Exchange, hits: np.ndarray) -> Acceptance:
    """The counts of the engine's steps over one answer.

    hits [targets, depths]: hits[i, d] is True if depth d + 1 guesses the answer's token 1 + i.
    """
    depths = hits.shape[1]
    drafted, accepted = [0] * depths, [0] * depths
    # At the token limit the engine does not draft the last token: the step itself gives the last token.
    last = exchange.num_targets - (0 if exchange.is_finished else 1)
    steps = pending = 0  # a step feeds the answer's token `pending` and drafts for pending + 1, ...
    while pending < exchange.num_targets:
        steps += 1
        room = depths if exchange.is_finished else min(depths, last - pending)
        num_accepted = 0
        for depth in range(min(room, last - pending)):
            if not hits[pending + depth, depth]:
                break
            num_accepted += 1
        for depth in range(room):
            drafted[depth] += 1
            accepted[depth] += depth < num_accepted
        pending += num_accepted + 1
    return Acceptance(steps, tuple(drafted), tuple(accepted))


def _hits(head: MTPHead, trunk: Trunk, batch: Batch, depths: int, draft_ids: mx.array | None) -> np.ndarray:
    """True where the draft of a depth equals the target's token.  [targets, depths]"""
    dtype = head.norm.weight.dtype  # fc may be quantised
    hidden = trunk.inner(batch.token_ids).astype(dtype)
    guesses = batch.guesses(chain_outputs(head, hidden, trunk.embed(batch.token_ids).astype(dtype), depths))
    mx.eval(guesses)
    size = max(1, MAX_LOGITS // trunk.vocab_size)
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
