"""Key and value buffers in which every row has its own length.

Each layer has one pair of buffers, `[slots, heads, capacity + 1, dim]`. A row writes at its length and
attends to its past:

    slot r   0 ................ start-1 | start .. start+fed-1 | ............ | capacity
             the row's past             | written by this pass | junk, masked | takes the padding's writes

The buffers store no length. Each forward pass has the starts of its rows (cache/placement.py), so a rollback
is a smaller start in the next pass. Cells past a row's end are masked, never assumed to be zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from outrider.cache.placement import Placement, Positions


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

    def exchange(self, source: int, target: int, one_way: bool) -> None:
        self.keys = exchanged(self.keys, source, target, one_way)
        self.values = exchanged(self.values, source, target, one_way)


class LayerView:
    """An attention layer's buffers during one forward pass, with the interface of mlx-lm's caches."""

    def __init__(self, kv: RaggedKV, placement: Placement) -> None:
        self._kv = kv
        self.placement = placement
        self.offset: Positions = placement.positions

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
        kv = self._kv
        self.put(self._write(kv.keys, keys), self._write(kv.values, values))
        self.placement.launch_every_few_layers(*kv.arrays())
        return self._read(kv.keys), self._read(kv.values)

    def make_mask(
        self, width: int, return_array: bool = True, window_size: int | None = None, **_: object
    ) -> mx.array:
        return self.placement.mask(window_size or self._kv.spec.window)

    def _write(self, buffer: mx.array, new: mx.array) -> mx.array:
        place = self.placement
        if place.is_range and len(place.slots) == buffer.shape[0]:  # all slots: a cheaper write
            cells = mx.broadcast_to(place.written[:, None, :, None], new.shape)
            return mx.put_along_axis(buffer, cells, new, axis=2)
        buffer[place.slot_ids, :, place.written] = new.transpose(0, 2, 1, 3)
        return buffer

    def _read(self, buffer: mx.array) -> mx.array:
        place = self.placement
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


def exchanged(buffer: mx.array, source: int, target: int, one_way: bool) -> mx.array:
    """The buffer with slot `source` copied to `target`; unless `one_way`, also `target` to `source`."""
    if one_way:
        buffer[target] = buffer[source]
    else:
        pair = mx.array([target, source])
        buffer[pair] = buffer[mx.array([source, target])]
    return buffer
