"""The optimiser: Muon for matrices, AdamW for norms and biases, and the learning rate over time.

Must not know the model.
"""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.optimizers as optimizers

# Chosen by hand, unless the comment gives a source. recipes/default_head/README.md compares rates and decays.
MUON_RMS = 0.2  # root mean square of a matrix's update at a learning rate of 1, as in Moonshot AI's Muon
MUON_DECAY = 0.1  # weight decay of the matrices
VECTOR_RATE = 0.2  # learning rate of norms and biases, as a share of the matrices' rate
MIN_RATE_FACTOR = 0.02  # learning rate at the end of the run, as a share of the highest rate
WARM_UP_STEPS = 60  # steps in which the learning rate rises
WARM_UP_SHARE = 0.1  # a short run warms up for this share of its steps instead
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of Keller Jordan's Muon


class Muon(optimizers.Muon):
    """mlx's Muon with updates of one size for every shape, one matrix per expert, and decoupled decay."""

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict) -> mx.array:
        momentum = self.momentum * state["v"] + (1 - self.momentum) * gradient
        state["v"] = momentum
        direction = orthogonal(self.momentum * momentum + (1 - self.momentum) * gradient, self.ns_steps)
        rate = self.learning_rate.astype(gradient.dtype)
        size = MUON_RMS * math.sqrt(max(parameter.shape[-2:]))
        return parameter * (1 - rate * self.weight_decay) - rate * size * direction


def orthogonal(matrix: mx.array, num_steps: int) -> mx.array:
    """Approximately the nearest orthogonal matrix, by Newton-Schulz. Leading axes are a batch of matrices."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.swapaxes(-1, -2) if is_tall else matrix
    x = x / (mx.sqrt((x * x).sum(axis=(-2, -1), keepdims=True)) + 1e-20)
    for _ in range(num_steps):
        gram = x @ x.swapaxes(-1, -2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.swapaxes(-1, -2) if is_tall else x


def new_optimizer() -> optimizers.MultiOptimizer:
    muon = Muon(learning_rate=0.0, weight_decay=MUON_DECAY)
    adam = optimizers.AdamW(learning_rate=0.0, betas=[0.9, 0.98], weight_decay=0.0, bias_correction=True)
    return optimizers.MultiOptimizer([muon, adam], [lambda _, parameter: parameter.ndim >= 2])


def set_rate(optimizer: optimizers.MultiOptimizer, rate: float) -> None:
    muon, adam = optimizer.optimizers
    muon.learning_rate = rate
    adam.learning_rate = VECTOR_RATE * rate


def rate_factor(step: int, share_done: float, num_steps: int | None) -> float:
    """Linear warm-up, then a cosine. `share_done`: how much of the run is done, 0..1."""
    warm_up = WARM_UP_STEPS if num_steps is None else min(WARM_UP_STEPS, 1 + int(WARM_UP_SHARE * num_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, share_done)))
    return min(1.0, (step + 1) / warm_up) * (MIN_RATE_FACTOR + (1 - MIN_RATE_FACTOR) * cosine)
