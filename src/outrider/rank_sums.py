"""Sums over the ranks of a model, added in the order of the ranks, and how linear layers are divided.

MLX's `all_sum` adds in an order that depends on the place of an element in the array. With three or more
ranks the last bit of a token's sum would depend on the tokens beside it, and quantised layers magnify such a
bit. So every rank gathers all parts and adds them in one order. All ranks then have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn


def sum_over_ranks(part: mx.array, group: mx.distributed.Group) -> mx.array:
    """part [tokens, ...]: the same shape on all ranks."""
    gathered = mx.distributed.all_gather(part, group=group)  # [ranks * tokens, ...]
    total, *others = mx.split(gathered, group.size())
    for other in others:
        total = total + other
    return total


@dataclass(frozen=True)
class Division:
    """How a linear layer is divided among the ranks: the `division` of its module."""

    axis: int | None  # of the weights [outputs, inputs]; None: in a way of its own
    group: mx.distributed.Group

    def own(self, array: mx.array, axis: int) -> mx.array:
        """This rank's part of an array of the whole layer."""
        return mx.split(array, self.group.size(), axis)[self.group.rank()]


def division_of(linear: nn.Module) -> Division | None:
    found: Division | None = getattr(linear, "division", None)
    return found


def own_linear(layer: nn.Module) -> nn.Module:
    """A linear layer without its sum over the ranks."""
    return layer.linear if isinstance(layer, SummedLinear) else layer


class SummedLinear(nn.Module):
    """A linear layer whose inputs are divided among the ranks: the outputs of all ranks are summed."""

    _ranks: mx.distributed.Group | None  # None: see `without_sums`

    def __init__(self, linear: nn.Module, bias: mx.array | None, group: mx.distributed.Group) -> None:
        super().__init__()
        self.linear = linear
        self._ranks = group
        if bias is not None:
            self.bias = bias

    def __call__(self, x: mx.array) -> mx.array:
        return self.total(self.linear(x))

    def total(self, part: mx.array) -> mx.array:
        """The layer's output, from what `linear` gives on each rank."""
        summed = part if self._ranks is None else sum_over_ranks(part, self._ranks)
        return summed + self.bias if "bias" in self else summed


class _SummedOutput:
    _ranks: mx.distributed.Group | None

    def __call__(self, *inputs: Any, **named: Any) -> mx.array:
        part: mx.array = super().__call__(*inputs, **named)  # type: ignore[misc]
        return part if self._ranks is None else sum_over_ranks(part, self._ranks)


def sum_output(layer: nn.Module) -> None:
    """Let a layer of mlx-lm whose last operation is `all_sum` add in the order of the ranks."""
    layer._ranks, layer.sharding_group = layer.sharding_group, None
    kind: type[nn.Module] = type(layer)
    layer.__class__ = _summed_class(kind)


@cache
def _summed_class(kind: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_SummedOutput, kind), names)


def other_sums(model: nn.Module) -> list[nn.Module]:
    """The layers that communicate with other ranks in a way of their own."""
    return [layer for _, layer in model.named_modules() if _has_group(layer) and not _is_summed(layer)]


@contextmanager
def without_sums(model: nn.Module) -> Iterator[None]:
    """Passes that are built while the context is open have this rank's part in the place of each sum.

    So a rank can check its layers alone. There must be no `other_sums`.
    """
    layers: list[Any] = [layer for _, layer in model.named_modules() if _is_summed(layer)]
    groups = [layer._ranks for layer in layers]
    for layer in layers:
        layer._ranks = None
    try:
        yield
    finally:
        for layer, group in zip(layers, groups, strict=True):
            layer._ranks = group


def _has_group(layer: nn.Module) -> bool:
    return any(isinstance(value, mx.distributed.Group) for value in vars(layer).values())


def _is_summed(layer: nn.Module) -> bool:
    return isinstance(layer, SummedLinear | _SummedOutput)
