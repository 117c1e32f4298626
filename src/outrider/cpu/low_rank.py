"""Adapters on quantised layers of CPUs: their low-rank terms, computed by native/extension/low_rank.h.

A token's result is the same to the bit in all passes, whatever rows and adapters are beside it: quantised
layers would make a difference of a last bit visible. Fused layers (cpu/fused_layers.py) take the same terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from outrider.cache.placement import LowRankTerms, RowAdapters
from outrider.cpu import extension
from outrider.cpu.quantized import is_kept
from outrider.rank_sums import own_linear

STEP = 16  # inputs and outputs of a layer must be multiples: floats of the widest register
PATH = "_adapter_path"  # attribute of an adapted layer: its path in the model

Arrays = Sequence[mx.array | None]  # of each adapter, by its id; that of id 0 is None


class NativeTerms:
    """The terms of one layer: y = gain * y + (x @ a.T) @ b + shift, all in float32."""

    def __init__(self, a: Arrays, b: Arrays, gains: Arrays, shifts: Arrays) -> None:
        """a [rank, inputs]; b [rank, outputs]; gains, shifts [outputs]"""
        self.native = extension.loaded().LowRank(list(a), list(b), list(gains), list(shifts))

    def add(self, y: mx.array, x: mx.array, ids: mx.array) -> mx.array:
        rows = ids.shape[0]
        by_row = (array.astype(mx.float32).reshape(rows, -1, array.shape[-1]) for array in (y, x))
        return self.native(*by_row, ids).reshape(y.shape)


def takes_native_terms(layer: nn.Module, num_inputs: int, num_outputs: int) -> bool:
    return is_kept(layer) and num_inputs % STEP == 0 and num_outputs % STEP == 0


def native_terms(
    adapters: RowAdapters | None, *parts: tuple[nn.Module, Sequence[str]]
) -> tuple[mx.array | None, Sequence[Any]]:
    """What fused layers take: the rows' adapters, and the terms of the linear layers with these names.

    (None, ()) if no adapter changes one of them.
    """
    if adapters is None:
        return None, ()
    linears = [own_linear(module[name]) for module, names in parts for name in names]
    found = [adapters.terms.get(getattr(linear, PATH, "")) for linear in linears]
    if not any(found):
        return None, ()
    return adapters.ids, [_native(each) for each in found]


def _native(terms: LowRankTerms | None) -> Any:
    if terms is None:
        return _no_terms()
    assert isinstance(terms, NativeTerms)  # a fused layer has sizes that they take
    return terms.native


@cache
def _no_terms() -> Any:
    return extension.loaded().LowRank()
