"""Key and value buffers in which every row has its own length.

Each layer has one pair of buffers, `[slots, heads, capacity + 1, dim]`. A row writes at its length and
attends to its past:

    slot r   0 ................ start-1 | start .. start+fed-1 | ............ | capacity
             the row's past             | written by this pass | junk, masked | takes the padding's writes

or, where cells are kept by blocks, `[blocks, heads, block size, dim]`. A row's cells are then in blocks
anywhere in the buffers, and a block that no row writes any more may belong to several rows:

    row r    blocks 7, 3, 9     cells 0..63 | 64..127 | 128..191       (RowPlan.blocks: the scheduler's table)

Cells may be bfloat16 or codes (cache/cell_format.py). A buffer of codes is three arrays with these axes (on
GPUs one).

The buffers store no length and no table. Each forward pass has the starts and the tables of its rows
(cache/placement.py), so a rollback is a smaller start in the next pass. Cells past a row's end are masked,
never assumed to be zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from outrider.cache import cell_writes
from outrider.cache.cell_buffer import CellBuffer
from outrider.cache.cell_format import BFLOAT16_BITS, GROUP_SIZES, CellFormat
from outrider.cache.placement import Placement, Positions

# (keys, values, buffers, starts, num_fed, places, has blocks) -> the new buffers: see cpu/cells.py.
WriteCells = Callable[..., Sequence[mx.array]]


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The keys and values that one layer stores for one cell."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int | None = None  # sliding-window layers attend to this many cells
    bits: int | None = None  # 8 or 4: of codes; 16: cells are bfloat16; None: they are stored in `dtype`

    @property
    def key_format(self) -> CellFormat:
        return self._format(self.key_dim)

    @property
    def value_format(self) -> CellFormat:
        return self._format(self.value_dim)

    def _format(self, dim: int) -> CellFormat:
        return CellFormat(dim, self.dtype, self.bits if dim else None)

    @property
    def bytes_per_cell(self) -> int:
        return self.num_heads * (self.key_format.num_bytes + self.value_format.num_bytes)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of a slot that do not grow with its cells."""
        return 0

    def quantized(self, bits: int | None) -> KVSpec:
        """The same keys and values with so many bits. Raises ValueError if they do not divide into groups."""
        if bits == BFLOAT16_BITS:
            return replace(self, bits=bits if self.dtype == mx.float32 else None)
        for name, dim in (("keys", self.key_dim), ("values", self.value_dim)):
            if bits is not None and dim % GROUP_SIZES[-1]:
                raise ValueError(f"{name} of {dim} elements, which is no multiple of {GROUP_SIZES[-1]}")
        return replace(self, bits=bits)


class RaggedKV:
    """The buffers of one layer."""

    def __init__(self, spec: KVSpec, write_cells: WriteCells | None = None) -> None:
        """`write_cells`: writes float32 keys and values of equal size; None: MLX's operations do."""
        self.spec = spec
        self._write_cells = write_cells if spec.dtype == mx.float32 else None
        self.key_cells = CellBuffer(spec.num_heads, spec.key_format)
        self.value_cells = CellBuffer(spec.num_heads, spec.value_format)
        self.attends_natively: bool | None = None  # None: not decided

    @property
    def cells(self) -> tuple[CellBuffer, CellBuffer]:
        return self.key_cells, self.value_cells

    @property
    def keys(self) -> mx.array:
        """The keys, or their codes."""
        return self.key_cells.arrays[0]

    @keys.setter
    def keys(self, array: mx.array) -> None:
        self.key_cells.arrays[0] = array

    @property
    def values(self) -> mx.array:
        """The values, or their codes."""
        return self.value_cells.arrays[0]

    @values.setter
    def values(self, array: mx.array) -> None:
        self.value_cells.arrays[0] = array

    @property
    def num_bytes(self) -> int:
        return sum(cells.num_bytes for cells in self.cells)

    def arrays(self) -> list[mx.array]:
        """Keys and values. If they are codes and not packed: codes, scales, biases of the keys, then of the
        values."""
        return [*self.key_cells.arrays, *self.value_cells.arrays]

    def put(self, arrays: Sequence[mx.array]) -> None:
        """Replace what `arrays` gives."""
        num_key_arrays = len(self.key_cells.arrays)
        self.key_cells.arrays = list(arrays[:num_key_arrays])
        self.value_cells.arrays = list(arrays[num_key_arrays:])

    def write(self, keys: mx.array, values: mx.array, place: Placement) -> None:
        """Each row's tokens into its own cells.  [rows, heads, width, dim]"""
        of_keys, of_values = self.spec.key_format, self.spec.value_format
        num_vectors = math.prod(keys.shape[:3])
        if place.has_blocks and of_keys == of_values and cell_writes.supports(of_keys, num_vectors):
            arrays = self.keys, self.values
            self.keys, self.values = cell_writes.write(keys, values, arrays, of_keys, place)
            return
        if self._write_cells is not None and of_keys == of_values and not of_keys.is_packed:
            # No name for the old buffers: whoever holds them makes the operation copy them.
            where = place.starts, place.num_fed, place.places, place.has_blocks
            self.put(self._write_cells(keys, values, self.arrays(), *where))
            return
        if of_keys == of_values:
            encoded = of_keys.encode_both(keys, values)
        else:
            encoded = of_keys.encode(keys), of_values.encode(values)
        for cells, parts in zip(self.cells, encoded, strict=True):
            cells.write(parts, place)

    def resize(self, num_slots: int, capacity: int) -> None:
        for cells in self.cells:
            cells.resize(num_slots, capacity)

    def resize_blocks(self, num_blocks: int, block_size: int, kept: Sequence[int] | None = None) -> None:
        """Have so many blocks: those of `kept` in this order, or the first ones there are; then zeros."""
        for cells in self.cells:
            cells.resize_blocks(num_blocks, block_size, kept)

    def exchange(self, source: int, target: int, one_way: bool) -> None:
        for cells in self.cells:
            cells.exchange(source, target, one_way)


class LayerView:
    """An attention layer's buffers during one forward pass, with the interface of mlx-lm's caches."""

    def __init__(self, kv: RaggedKV, placement: Placement) -> None:
        self.kv = kv
        self.placement = placement
        self.offset: Positions = placement.positions
        self._fetched: tuple[mx.array, mx.array] | None = None  # the keys and values that the model got

    @property
    def keys(self) -> mx.array:
        return self.kv.keys

    @keys.setter
    def keys(self, _: mx.array) -> None:
        """Does nothing. Some mlx-lm models assign the keys to get them evaluated; here all buffers are."""

    @property
    def spec(self) -> KVSpec:
        return self.kv.spec

    def arrays(self) -> list[mx.array]:
        """The keys and values of all slots: see `RaggedKV.arrays`."""
        return self.kv.arrays()

    def put(self, arrays: Sequence[mx.array]) -> None:
        """Replace the keys and values of all slots."""
        self.kv.put(arrays)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.write(keys, values)
        self.placement.launch_every_few_layers(*self.kv.arrays())
        fetched = self.read()
        self._fetched = fetched
        return fetched

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Each row's tokens into its own cells.  [rows, heads, width, dim]"""
        self.kv.write(keys, values, self.placement)

    def read(self) -> tuple[mx.array, mx.array]:
        """The keys and values of all rows up to the longest one's end.  [rows, heads, cells, dim]"""
        return self.kv.key_cells.read(self.placement), self.kv.value_cells.read(self.placement)

    def window_of(self, keys: object, values: object, mask: object) -> int | None:
        """The window that attention has, 0 for none. None if the model has changed what it got from here."""
        if self._fetched is None or keys is not self._fetched[0] or values is not self._fetched[1]:
            return None
        return self.placement.window_of(mask)

    def attends_natively(self, may: Callable[[], bool]) -> bool:
        """What `may` says at the layer's first pass: rows must not meet another arithmetic half-way."""
        if self.kv.attends_natively is None:
            self.kv.attends_natively = may()
        return self.kv.attends_natively

    def groups(
        self, keys: object, values: object, mask: object
    ) -> list[tuple[mx.array, LayerView, mx.array]]:
        """The rows of each group, the view of its cells and its mask; empty if all rows attend together.

        Also empty if the model has changed the keys or values that it fetched, or the mask that it got.
        """
        window = self.window_of(keys, values, mask) if self.placement.has_groups else None
        if window is None:
            return []
        views = [(group, LayerView(self.kv, group.place)) for group in self.placement.groups]
        return [(group.rows, view, view.placement.mask(window or None)) for group, view in views]

    def make_mask(
        self, width: int, return_array: bool = True, window_size: int | None = None, **_: object
    ) -> mx.array:
        return self.placement.mask(window_size or self.kv.spec.window)
