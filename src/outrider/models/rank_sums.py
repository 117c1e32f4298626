"""Sums over the ranks of a model, added in the order of the ranks.

MLX's `all_sum` adds in an order that depends on the place of an element in the array. With three or more
ranks the last bit of a token's sum would depend on the tokens beside it, and quantised layers magnify such a
bit. So every rank gathers all parts and adds them in one order. All ranks then have the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn


def sum_over_ranks(part: mx.array, group: mx.distributed.Group) -> mx.array:
    parts = mx.distributed.all_gather(part[None], group=group)  # [ranks, ...]
    total = parts[0]
    for rank in range(1, group.size()):
        total = total + parts[rank]
    return total


class SummedLinear(nn.Module):
    """A linear layer whose inputs are divided among the ranks: the outputs of all ranks are summed."""

    def __init__(self, linear: nn.Module, bias: mx.array | None, group: mx.distributed.Group) -> None:
        super().__init__()
        self.linear = linear
        self._group = group
        if bias is not None:
            self.bias = bias

    def __call__(self, x: mx.array) -> mx.array:
        summed = sum_over_ranks(self.linear(x), self._group)
        return summed + self.bias if "bias" in self else summed


class _SummedOutput:
    _ranks: mx.distributed.Group

    def __call__(self, *inputs: Any, **named: Any) -> mx.array:
        part = super().__call__(*inputs, **named)  # type: ignore[misc]
        return sum_over_ranks(part, self._ranks)


def sum_output(layer: nn.Module) -> None:
    """Let a layer of mlx-lm whose last operation is `all_sum` add in the order of the ranks."""
    layer._ranks, layer.sharding_group = layer.sharding_group, None
    kind: type[nn.Module] = type(layer)
    layer.__class__ = _summed_class(kind)


@cache
def _summed_class(kind: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_SummedOutput, kind), names)
