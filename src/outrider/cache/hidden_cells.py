"""Hidden states by cell, which an MTP head is fed later.

They are stored in key and value buffers, so that resizing, moving and accounting are the same code. They have
the bits of the keys and values beside them, but 8 at least, if they divide into groups: otherwise they could
be the largest part of a cell. They affect drafts only, never the answer.
"""

from __future__ import annotations

import mlx.core as mx

from outrider.cache.cell_format import BFLOAT16_BITS, GROUP_SIZES
from outrider.cache.placement import Placement
from outrider.cache.ragged_kv import KVSpec, LayerView, RaggedKV, WriteCells

LEAST_BITS = 8  # with 4 bits drafts would be worse


class HiddenCells:
    def __init__(
        self,
        hidden_size: int,
        dtype: mx.Dtype,
        kv_bits: int | None = None,
        write_cells: WriteCells | None = None,
    ) -> None:
        """`kv_bits`: of the cells beside them. `write_cells`: see RaggedKV."""
        self._half = hidden_size // 2
        spec = KVSpec(1, self._half, hidden_size - self._half, dtype)
        if kv_bits is not None and (kv_bits == BFLOAT16_BITS or hidden_size % (2 * GROUP_SIZES[-1]) == 0):
            spec = spec.quantized(max(kv_bits, LEAST_BITS))
        self.kv = RaggedKV(spec, write_cells)

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
        return mx.concatenate([half.at(first, cells) for half in self.kv.cells], axis=-1)
