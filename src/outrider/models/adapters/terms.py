"""What the rows of a pass compute with their adapters, and the class of the layers that adapters change.

mlx-lm calls a linear layer with its input only. So the adapters of the pass that is being built are in one
object, `CurrentPass`, which the layers of a trunk share. `Trunk.hidden` sets it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import mlx.nn as nn

from outrider.cache.placement import RowAdapters
from outrider.cpu.low_rank import NativeTerms, takes_native_terms
from outrider.models.adapters.fit import LayerTerms, linear_shape

RANKS = (8, 16, 32, 64, 128, 256, 512)  # to which stacked arrays are padded, so that few shapes are traced
NUM_ADAPTERS = (2, 4, 8, 16, 32, 64)  # likewise


class CurrentPass:
    """The adapters of the pass that is being built."""

    def __init__(self) -> None:
        self.adapters: RowAdapters | None = None

    @contextmanager
    def of(self, adapters: RowAdapters | None) -> Iterator[None]:
        self.adapters = adapters
        try:
            yield
        finally:
            self.adapters = None


class _Adapted:
    _current_pass: CurrentPass
    _adapter_path: str  # cpu/low_rank.py reads it too

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = super().__call__(x)  # type: ignore[misc]
        adapters = self._current_pass.adapters
        terms = None if adapters is None else adapters.terms.get(self._adapter_path)
        return y if adapters is None or terms is None else terms.add(y, x, adapters.ids)


@cache
def _adapted_class(kind: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_Adapted, kind), names)


def use_adapters(layer: nn.Module, path: str, current_pass: CurrentPass) -> None:
    """Give a linear layer the class that adds the terms of a pass's rows."""
    if not isinstance(layer, _Adapted):
        kind: type[nn.Module] = type(layer)
        layer.__class__ = _adapted_class(kind)
    layer._current_pass, layer._adapter_path = current_pass, path


def plain_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that a layer had before `use_adapters`."""
    return kind.__bases__[1] if issubclass(kind, _Adapted) else kind


@dataclass(frozen=True)
class StackedTerms:
    """The terms of one layer for all adapters, as arrays that rows gather from by id. Id 0 has zeros."""

    a: mx.array  # [ids, rank, inputs]
    b: mx.array  # [ids, outputs, rank]
    gain: mx.array | None = None  # [ids, outputs]; None: no adapter has one
    shift: mx.array | None = None

    @property
    def arrays(self) -> dict[str, mx.array]:
        return {name: array for name, array in vars(self).items() if array is not None}

    def add(self, y: mx.array, x: mx.array, ids: mx.array) -> mx.array:
        by_row = (ids.shape[0], -1)
        own, tokens = (array.reshape(*by_row, array.shape[-1]) for array in (y, x))
        reduced = mx.gather_mm(tokens.astype(self.a.dtype), self.a.swapaxes(1, 2), rhs_indices=ids)
        adapted = mx.gather_mm(reduced, self.b.swapaxes(1, 2), rhs_indices=ids).astype(y.dtype)
        if self.gain is not None:
            adapted = adapted + own * self.gain[ids][:, None]
        else:
            adapted = adapted + own
        if self.shift is not None:
            adapted = adapted + self.shift[ids][:, None]
        return mx.where((ids > 0)[:, None, None], adapted, own).reshape(y.shape)


def new_terms(
    layer: nn.Module, by_id: Sequence[LayerTerms | None], dtype: mx.Dtype
) -> NativeTerms | StackedTerms:
    """The terms of a layer. Entry i of `by_id` is that of adapter i; None: it does not change the layer."""
    num_outputs, num_inputs = linear_shape(layer)
    if takes_native_terms(layer, num_inputs, num_outputs):
        names = ("a", "b", "gain", "shift")
        lists = ([None if own is None else getattr(own, name) for own in by_id] for name in names)
        return NativeTerms(*lists)
    return _stacked(by_id, num_inputs, num_outputs, dtype)


def _stacked(
    by_id: Sequence[LayerTerms | None], num_inputs: int, num_outputs: int, dtype: mx.Dtype
) -> StackedTerms:
    num_ids = 1 + next(num for num in (*NUM_ADAPTERS, len(by_id)) if num >= len(by_id) - 1)
    most = max(own.a.shape[0] for own in by_id if own is not None)
    rank = next(rank for rank in RANKS if rank >= most)
    a, b = mx.zeros((num_ids, rank, num_inputs), dtype), mx.zeros((num_ids, num_outputs, rank), dtype)
    gain = shift = None
    if any(own is not None and own.gain is not None for own in by_id):
        gain = mx.ones((num_ids, num_outputs), dtype)
    if any(own is not None and own.shift is not None for own in by_id):
        shift = mx.zeros((num_ids, num_outputs), dtype)
    for i, own in enumerate(by_id):
        if own is None:
            continue
        own_rank = own.a.shape[0]
        a[i, :own_rank], b[i, :, :own_rank] = own.a.astype(dtype), own.b.T.astype(dtype)
        if gain is not None and own.gain is not None:
            gain[i] = own.gain.astype(dtype)
        if shift is not None and own.shift is not None:
            shift[i] = own.shift.astype(dtype)
    stacked = StackedTerms(a, b, gain, shift)
    mx.eval(stacked.arrays)
    return stacked
