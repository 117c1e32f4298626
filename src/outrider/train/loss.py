"""The loss: how far the head's guesses are from the trunk's own distribution, at every depth.

    target       m = (1 - hard) * the trunk's distribution + hard * its favourite
    per guess    cross-entropy with m, less what the trunk's own entropy adds
    per depth    weight 1, 0.8, 0.64, ...

A guess and its target are as wide as the vocabulary, so they are made and dropped a few rows at a time; what
is kept is the gradient of each guess before the projection. That gradient is written out (softmax less
target) rather than traced: fewer passes over the vocabulary. Must not know how guesses are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from outrider.models.trunk import Trunk
from outrider.train.batches import Batch

HARD_SHARE = 0.15
DEPTH_DECAY = 0.8
LOGITS_AT_ONCE = 1 << 25  # numbers: 128 MiB in float32


@dataclass(frozen=True)
class BatchLoss:
    total: float  # what is minimised
    divergence: tuple[float, ...]  # KL by depth, in nats a target

    def times(self, share: float) -> BatchLoss:
        return BatchLoss(share * self.total, tuple(share * one for one in self.divergence))

    def plus(self, other: BatchLoss) -> BatchLoss:
        both = zip(self.divergence, other.divergence, strict=True)
        return BatchLoss(self.total + other.total, tuple(a + b for a, b in both))


@dataclass(frozen=True)
class _Target:
    """What some rows' guesses are compared with."""

    mixed: mx.array  # [n, vocab]
    favourite: mx.array  # [n, 1]
    entropy: mx.array  # [n] of the trunk's distribution


def loss_and_gradients(
    trunk: Trunk, guesses: list[mx.array], states: mx.array, batch: Batch
) -> tuple[BatchLoss, list[mx.array]]:
    """The loss, and its gradient at the guesses.  guesses: one [targets, H] a depth; states [targets, H]"""
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
    size = max(1, LOGITS_AT_ONCE // vocab_size)
    return (slice(start, start + size) for start in range(0, num_rows, size))


def _target(trunk: Trunk, states: mx.array) -> _Target:
    logits = trunk.logits(states[None])[0]
    p = mx.softmax(logits, axis=-1)
    entropy = _normaliser(logits, p) - (p * logits).sum(axis=-1)
    favourite = mx.argmax(logits, axis=-1, keepdims=True)
    mixed = (1 - HARD_SHARE) * p
    share = mx.take_along_axis(mixed, favourite, axis=-1) + HARD_SHARE
    return _Target(mx.put_along_axis(mixed, favourite, share, axis=-1), favourite, entropy)


def _compare(
    trunk: Trunk, guess: mx.array, target: _Target, weights: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Loss [n], KL [n], and the gradient of the weighted loss [n, H]."""

    def project(guess: mx.array) -> mx.array:
        return trunk.logits(guess.astype(trunk.dtype)[None])[0]

    logits = project(guess)
    q = mx.softmax(logits, axis=-1)
    normaliser = _normaliser(logits, q)
    mixed = (target.mixed * logits).sum(axis=-1)
    hard = mx.take_along_axis(logits, target.favourite, axis=-1)[:, 0]
    soft = (mixed - HARD_SHARE * hard) / (1 - HARD_SHARE)  # the trunk's mean of the guess's logits
    loss = normaliser - mixed - (1 - HARD_SHARE) * target.entropy
    _, (gradient,) = mx.vjp(project, [guess], [weights[:, None] * (q - target.mixed)])
    return loss, normaliser - soft - target.entropy, gradient


def _normaliser(logits: mx.array, probabilities: mx.array) -> mx.array:
    """log(sum(exp(logits))), from a softmax that is there already.  [n, vocab] -> [n]"""
    return logits.max(axis=-1) - mx.log(probabilities.max(axis=-1))
