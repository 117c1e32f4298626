"""Hidden states by cell.

They are stored in key and value buffers, so that resizing, moving and accounting are the same code.
"""

from __future__ import annotations

import mlx.core as mx

from outrider.cache.placement import Placement
from outrider.cache.ragged_kv import KVSpec, LayerView, RaggedKV


class HiddenCells:
    def __init__(self, hidden_size: int, dtype: mx.Dtype) -> None:
        self._half = hidden_size // 2
        self.kv = RaggedKV(KVSpec(1, self._half, hidden_size - self._half, dtype))

    def write(self, hidden: mx.array, place: Placement) -> None:
        """[rows, width, H]"""
        hidden = hidden[:, None]
        LayerView(self.kv, place).write(hidden[..., : self._half], hidden[..., self._half :])

    def read(self, place: Placement) -> mx.array:
        """[rows, width, H]; columns that are not fed hold junk."""
        if place.tables is not None:
            first, cells = place.read_blocks
        else:
            first, cells = place.slot_ids, mx.minimum(place.cells, place.limit)
        return mx.concatenate([x[first, 0, cells] for x in (self.kv.keys, self.kv.values)], axis=-1)
