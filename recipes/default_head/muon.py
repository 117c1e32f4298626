"""Muon: momentum with orthogonalised steps and decoupled weight decay.

Follows https://kellerjordan.github.io/posts/muon/. Steps are scaled to the size of AdamW's steps. Matrices of
one shape are computed together, and the rate is a tensor, so that a step can be part of a CUDA graph.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration
ITERATIONS = 5
STEP_RMS = 0.2  # root mean square of a step at rate 1, about that of AdamW's steps


class Muon:
    def __init__(self, matrices: Iterable[Tensor], decay: float, momentum: float = 0.95) -> None:
        self._decay, self._momentum = decay, momentum
        self._groups: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for matrix in matrices:
            short, long = sorted(matrix.shape)
            self._groups[short, long].append(matrix)
        self._averages = {
            shape: torch.zeros(len(group), *shape, device=group[0].device)
            for shape, group in self._groups.items()
        }

    @torch.no_grad()
    def step(self, rate: Tensor) -> None:
        """Take one step at `rate` (a tensor of one number) and clear the gradients."""
        for shape, group in self._groups.items():
            gradients = torch.stack([wide(matrix.grad, shape) for matrix in group])
            average = self._averages[shape].lerp_(gradients, 1 - self._momentum)
            directions = orthogonal(gradients.lerp(average, self._momentum))
            steps = directions * (rate * STEP_RMS * math.sqrt(shape[1]))
            for matrix, step in zip(group, steps, strict=True):
                matrix.mul_(1 - rate * self._decay).sub_(wide(step, tuple(matrix.shape)))
                matrix.grad = None

    def state(self) -> dict[str, Tensor]:
        return {str(shape): average for shape, average in self._averages.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        for shape, average in self._averages.items():
            average.copy_(state[str(shape)])


def wide(matrix: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """The matrix or its transpose, whichever has this shape."""
    assert matrix is not None, "a matrix has no gradient"
    return matrix if tuple(matrix.shape) == shape else matrix.T


def orthogonal(x: Tensor) -> Tensor:
    """Approximately the nearest matrices with orthonormal rows.  [k, short, long] -> float32"""
    a, b, c = COEFFICIENTS
    x = x.bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.float()
