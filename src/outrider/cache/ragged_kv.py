"""Key and value buffers in which every row has its own length.

Each layer has one pair of buffers, `[slots, heads, capacity + 1, dim]`. A row writes at its length and
attends to its past:

    slot r   0 ................ start-1 | start .. start+fed-1 | ............ | capacity
             the row's past             | written by this pass | junk, masked | takes the padding's writes

or, where cells are kept by blocks, `[blocks, heads, block size, dim]`. A row's cells are then in blocks
anywhere in the buffers, and a block that no row writes any more may belong to several rows:

    row r    blocks 7, 3, 9     cells 0..63 | 64..127 | 128..191       (RowPlan.blocks: the scheduler's table)

The buffers store no length and no table. Each forward pass has the starts and the tables of its rows
(cache/placement.py), so a rollback is a smaller start in the next pass. Cells past a row's end are masked,
never assumed to be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from outrider.cache.placement import Placement, Positions
from outrider.plan import NUM_SPARE_BLOCKS


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The keys and values that one layer stores for one cell."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int | None = None  # sliding-window layers attend to this many cells

    @property
    def bytes_per_cell(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype.size

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of a slot that do not grow with its cells."""
        return 0


class RaggedKV:
    """The buffers of one layer."""

    def __init__(self, spec: KVSpec) -> None:
        self.spec = spec
        self.keys = mx.zeros((0, spec.num_heads, 1, spec.key_dim), spec.dtype)
        self.values = mx.zeros((0, spec.num_heads, 1, spec.value_dim), spec.dtype)
        self.attends_natively: bool | None = None  # None: not decided

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def arrays(self) -> list[mx.array]:
        return [self.keys, self.values]

    def put(self, arrays: Sequence[mx.array]) -> None:
        self.keys, self.values = arrays

    def resize(self, num_slots: int, capacity: int) -> None:
        self.keys = _resized(self.keys, num_slots, capacity + 1)
        self.values = _resized(self.values, num_slots, capacity + 1)

    def resize_blocks(self, num_blocks: int, block_size: int, kept: Sequence[int] | None = None) -> None:
        """Have so many blocks: those of `kept` in this order, or the first ones there are; then zeros."""
        self.keys = _resized_blocks(self.keys, num_blocks, block_size, kept)
        self.values = _resized_blocks(self.values, num_blocks, block_size, kept)

    def exchange(self, source: int, target: int, one_way: bool) -> None:
        self.keys = exchanged(self.keys, source, target, one_way)
        self.values = exchanged(self.values, source, target, one_way)


class LayerView:
    """An attention layer's buffers during one forward pass, with the interface of mlx-lm's caches."""

    def __init__(self, kv: RaggedKV, placement: Placement) -> None:
        self._kv = kv
        self.placement = placement
        self.offset: Positions = placement.positions
        self._fetched: tuple[mx.array, mx.array] | None = None  # the keys and values that the model got

    @property
    def keys(self) -> mx.array:
        return self._kv.keys

    @keys.setter
    def keys(self, _: mx.array) -> None:
        """Does nothing. Some mlx-lm models assign the keys to get them evaluated; here all buffers are."""

    def arrays(self) -> list[mx.array]:
        """The keys and values of all slots."""
        return self._kv.arrays()

    def put(self, keys: mx.array, values: mx.array) -> None:
        """Replace the keys and values of all slots."""
        self._kv.keys, self._kv.values = keys, values

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.write(keys, values)
        self.placement.launch_every_few_layers(*self._kv.arrays())
        fetched = self.read()
        self._fetched = fetched
        return fetched

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Each row's tokens into its own cells.  [rows, heads, width, dim]"""
        kv = self._kv
        self.put(self._write(kv.keys, keys), self._write(kv.values, values))

    def read(self) -> tuple[mx.array, mx.array]:
        """The keys and values of all rows up to the longest one's end.  [rows, heads, cells, dim]"""
        return self._read(self._kv.keys), self._read(self._kv.values)

    def window_of(self, keys: object, values: object, mask: object) -> int | None:
        """The window that attention has, 0 for none. None if the model has changed what it got from here."""
        if self._fetched is None or keys is not self._fetched[0] or values is not self._fetched[1]:
            return None
        return self.placement.window_of(mask)

    def attends_natively(self, may: Callable[[], bool]) -> bool:
        """What `may` says at the layer's first pass: rows must not meet another arithmetic half-way."""
        if self._kv.attends_natively is None:
            self._kv.attends_natively = may()
        return self._kv.attends_natively

    def groups(
        self, keys: object, values: object, mask: object
    ) -> list[tuple[mx.array, LayerView, mx.array]]:
        """The rows of each group, the view of its cells and its mask; empty if all rows attend together.

        Also empty if the model has changed the keys or values that it fetched, or the mask that it got.
        """
        window = self.window_of(keys, values, mask) if self.placement.has_groups else None
        if window is None:
            return []
        views = [(group, LayerView(self._kv, group.place)) for group in self.placement.groups]
        return [(group.rows, view, view.placement.mask(window or None)) for group, view in views]

    def make_mask(
        self, width: int, return_array: bool = True, window_size: int | None = None, **_: object
    ) -> mx.array:
        return self.placement.mask(window_size or self._kv.spec.window)

    def _write(self, buffer: mx.array, new: mx.array) -> mx.array:
        place = self.placement
        if place.tables is not None:
            blocks, cells = place.written_blocks
            buffer[blocks, :, cells] = new.transpose(0, 2, 1, 3)
            return buffer
        if place.is_range and len(place.slots) == buffer.shape[0]:  # all slots: a cheaper write
            cells = mx.broadcast_to(place.written[:, None, :, None], new.shape)
            return mx.put_along_axis(buffer, cells, new, axis=2)
        buffer[place.slot_ids, :, place.written] = new.transpose(0, 2, 1, 3)
        return buffer

    def _read(self, buffer: mx.array) -> mx.array:
        place = self.placement
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
