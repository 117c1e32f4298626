"""The keys, or the values, of all cells of one layer, in the arrays of their format.

Every array has the axes `[slots, heads, capacity + 1, elements]` or `[blocks, heads, block size, elements]`.
Code that moves cells as they are (resize, exchange, the prefix cache) treats all arrays alike. Only `read`
and `at` know the format.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from outrider import gpu_kernels
from outrider.cache.cell_format import CellFormat
from outrider.cache.placement import Placement
from outrider.plan import NUM_SPARE_BLOCKS


class CellBuffer:
    def __init__(self, num_heads: int, cell_format: CellFormat) -> None:
        self.format = cell_format
        self.arrays = [mx.zeros((0, num_heads, 1, size), dtype) for size, dtype in cell_format.parts]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def write(self, parts: Sequence[mx.array], place: Placement) -> None:
        """Each row's vectors, as `CellFormat.encode` gives them, into its own cells."""
        self.arrays = [_written(*pair, place) for pair in zip(self.arrays, parts, strict=True)]

    def read(self, place: Placement) -> mx.array:
        """The vectors of all rows up to the longest one's end.  [rows, heads, cells, dim]"""
        return self.format.decode([_read(array, place) for array in self.arrays])

    def at(self, places: mx.array, cells: mx.array) -> mx.array:
        """The vectors of the first head at these slots or blocks, and these cells of them."""
        return self.format.decode([array[places, 0, cells] for array in self.arrays])

    def resize(self, num_slots: int, capacity: int) -> None:
        self.arrays = [_resized(array, num_slots, capacity + 1) for array in self.arrays]

    def resize_blocks(self, num_blocks: int, block_size: int, kept: Sequence[int] | None) -> None:
        self.arrays = [_resized_blocks(array, num_blocks, block_size, kept) for array in self.arrays]

    def exchange(self, source: int, target: int, one_way: bool) -> None:
        self.arrays = [exchanged(array, source, target, one_way) for array in self.arrays]


def _written(buffer: mx.array, new: mx.array, place: Placement) -> mx.array:
    if place.tables is not None:
        cells = place.written_in_blocks(buffer.shape[1])
        rows, dim = buffer.reshape(-1, buffer.shape[-1]), buffer.shape[-1]
        if gpu_kernels.is_available():  # one kernel, also for vectors that are not contiguous
            rows[cells] = new
            return rows.reshape(buffer.shape)
        index = mx.broadcast_to(cells.reshape(-1, 1), (cells.size, dim))
        return mx.put_along_axis(rows, index, new.reshape(-1, dim), axis=0).reshape(buffer.shape)
    if place.is_range and len(place.slots) == buffer.shape[0]:  # all slots: a cheaper write
        cells = mx.broadcast_to(place.written[:, None, :, None], new.shape)
        return mx.put_along_axis(buffer, cells, new, axis=2)
    buffer[place.slot_ids, :, place.written] = new.transpose(0, 2, 1, 3)
    return buffer


def _read(buffer: mx.array, place: Placement) -> mx.array:
    if place.tables is not None:
        num_blocks, num_heads, size, dim = buffer.shape
        parts = buffer.reshape(num_blocks * num_heads, size * dim)[place.gathered_blocks(num_heads)]
        return parts.reshape(len(place.slots), num_heads, place.num_attended, dim)
    if place.is_range:
        return buffer[place.slots[0] : place.slots[-1] + 1, :, : place.num_attended]
    return buffer[place.slot_ids[:, 0], :, : place.num_attended]


def _resized(buffer: mx.array, num_slots: int, num_cells: int) -> mx.array:
    old_slots, num_heads, old_cells, dim = buffer.shape
    if (old_slots, old_cells) == (num_slots, num_cells):
        return buffer
    slots, cells = min(old_slots, num_slots), min(old_cells, num_cells) - 1  # not the padding's cell
    grown = mx.zeros((num_slots, num_heads, num_cells, dim), buffer.dtype)
    if slots:
        grown[:slots, :, :cells] = buffer[:slots, :, :cells]
    mx.eval(grown)  # one layer at a time: memory never holds the old and the new buffers of all layers
    return grown


def _resized_blocks(
    buffer: mx.array, num_blocks: int, block_size: int, kept: Sequence[int] | None
) -> mx.array:
    _, num_heads, _, dim = buffer.shape
    if num_blocks == 0:  # after a pass that failed the arrays cannot be read
        return mx.zeros((0, num_heads, block_size, dim), buffer.dtype)
    if kept is None and buffer.shape[0] == num_blocks:
        return buffer
    num_kept = min(buffer.shape[0], num_blocks) if kept is None else len(kept)
    resized = mx.zeros((num_blocks, num_heads, block_size, dim), buffer.dtype)
    if num_kept > NUM_SPARE_BLOCKS:
        old = buffer[:num_kept] if kept is None else buffer[mx.array(list(kept))]
        resized[NUM_SPARE_BLOCKS:num_kept] = old[NUM_SPARE_BLOCKS:]
    mx.eval(resized)  # one layer at a time, as above
    return resized


def exchanged(buffer: mx.array, source: int, target: int, one_way: bool) -> mx.array:
    """The buffer with slot `source` copied to `target`; unless `one_way`, also `target` to `source`."""
    if one_way:
        buffer[target] = buffer[source]
    else:
        pair = mx.array([target, source])
        buffer[pair] = buffer[mx.array([source, target])]
    return buffer
