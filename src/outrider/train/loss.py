"""The loss: the distance between the head's guesses and the trunk's distribution, at every depth.

    target       m = (1 - HARD_SHARE) * the trunk's distribution + HARD_SHARE * its most likely token
    per guess    cross-entropy with m, minus (1 - HARD_SHARE) * the entropy of the trunk's distribution
    per depth    weight 1, 0.8, 0.64, ...

Logits and targets are as wide as the vocabulary, so only a few rows of them exist at a time. The result for
each guess is its gradient before the projection. The gradient at the logits is written out (softmax minus
target) instead of traced, which needs fewer passes over the vocabulary. Must not know how guesses are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from outrider.models.trunk import Trunk
from outrider.train.batches import Batch

HARD_SHARE = 0.15  # weight of the most likely token in the target; as in recipes/default_head
DEPTH_DECAY = 0.8  # weight of a depth's loss relative to the depth before; as in recipes/default_head
MAX_LOGITS = 1 << 25  # logits in memory at once: 128 MiB in float32; chosen by hand


@dataclass(frozen=True)
class BatchLoss:
    total: float  # the minimised value
    divergence: tuple[float, ...]  # KL divergence by depth, in nats per target

    def times(self, share: float) -> BatchLoss:
        return BatchLoss(share * self.total, tuple(share * one for one in self.divergence))

    def plus(self, other: BatchLoss) -> BatchLoss:
        both = zip(self.divergence, other.divergence, strict=True)
        return BatchLoss(self.total + other.total, tuple(a + b for a, b in both))


@dataclass(frozen=True)
class _SoftTarget:
    """The target distributions of n guesses."""

    mixed: mx.array  # [n, vocab]
    best_ids: mx.array  # [n, 1] most likely token
    entropy: mx.array  # [n] of the trunk's distribution


def loss_and_gradients(
    trunk: Trunk, guesses: list[mx.array], states: mx.array, batch: Batch
) -> tuple[BatchLoss, list[mx.array]]:
    """The loss, and its gradient at the guesses.

    guesses: [targets, H] for each depth; states: [targets, H].
    """
    depths = len(guesses)
    has_chain = (batch.num_chains[:, None] >= mx.arange(1, depths + 1)).astype(mx.float32)
    weights = has_chain * mx.array([DEPTH_DECAY**depth for depth in range(depths)]) / batch.num_targets
    losses: list[list[mx.array]] = [[] for _ in guesses]
    divergences: list[list[mx.array]] = [[] for _ in guesses]
    gradients: list[list[mx.array]] = [[] for _ in guesses]
    for rows in _parts(batch.num_targets, trunk.vocab_size):
        target = _target(trunk, states[rows])
        for depth, guess in enumerate(guesses):
            loss, divergence, gradient = _compare(trunk, guess[rows], target, weights[rows, depth])
            mx.eval(loss, divergence, gradient)
            losses[depth].append(loss)
            divergences[depth].append(divergence)
            gradients[depth].append(gradient)
    loss = mx.stack([mx.concatenate(parts) for parts in losses], axis=-1)  # [targets, depths]
    divergence = mx.stack([mx.concatenate(parts) for parts in divergences], axis=-1)
    by_depth = (has_chain * divergence).sum(axis=0) / mx.maximum(has_chain.sum(axis=0), 1)
    total = (weights * loss).sum()
    return BatchLoss(float(total), tuple(map(float, by_depth))), [
        mx.concatenate(parts) for parts in gradients
    ]


def _parts(num_rows: int, vocab_size: int) -> Iterator[slice]:
    size = max(1, MAX_LOGITS // vocab_size)
    return (slice(start, start + size) for start in range(0, num_rows, size))


def _target(trunk: Trunk, states: mx.array) -> _SoftTarget:
    logits = trunk.logits(states[None])[0]
    p = mx.softmax(logits, axis=-1)
    entropy = _normaliser(logits, p) - (p * logits).sum(axis=-1)
    best_ids = mx.argmax(logits, axis=-1, keepdims=True)
    mixed = (1 - HARD_SHARE) * p
    share = mx.take_along_axis(mixed, best_ids, axis=-1) + HARD_SHARE
    return _SoftTarget(mx.put_along_axis(mixed, best_ids, share, axis=-1), best_ids, entropy)


def _compare(
    trunk: Trunk, guess: mx.array, target: _SoftTarget, weights: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Loss [n], KL [n], and the gradient of the weighted loss [n, H]."""

    def project(guess: mx.array) -> mx.array:
        return trunk.logits(guess.astype(trunk.dtype)[None])[0]

    logits = project(guess)
    q = mx.softmax(logits, axis=-1)
    normaliser = _normaliser(logits, q)
    mixed = (target.mixed * logits).sum(axis=-1)
    hard = mx.take_along_axis(logits, target.best_ids, axis=-1)[:, 0]
    soft = (mixed - HARD_SHARE * hard) / (1 - HARD_SHARE)  # mean of the logits under the trunk's distribution
    loss = normaliser - mixed - (1 - HARD_SHARE) * target.entropy
    _, (gradient,) = mx.vjp(project, [guess], [weights[:, None] * (q - target.mixed)])
    return loss, normaliser - soft - target.entropy, gradient


def _normaliser(logits: mx.array, probabilities: mx.array) -> mx.array:
    """log(sum(exp(logits))), computed from the softmax of the logits.  [n, vocab] -> [n]"""
    return logits.max(axis=-1) - mx.log(probabilities.max(axis=-1))
