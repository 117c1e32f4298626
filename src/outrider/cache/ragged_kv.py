"""Key and value buffers in which every row has its own length.

A pair of buffers a layer, `[slots, heads, capacity + 1, dim]`. A row writes at its length and sees its past:

    slot r   0 ................ start-1 | start .. start+fed-1 | ............ | capacity
             the row's past             | written by this pass | junk, masked | takes the padding's writes

Nothing here stores a length: each forward pass says where its rows start, so a rollback is a smaller start
in the next pass. Cells past a row's end are masked, never assumed to be zero.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar
from weakref import WeakValueDictionary

import mlx.core as mx

T = TypeVar("T")

VIEW_STEP = 16  # cells by which the attended part of a buffer grows, so that shapes repeat
LONG_VIEW, LONG_VIEW_STEP = 256, 32  # beyond, a product over 16 odd cells may round by its number of threads
LAUNCH_EVERY = 2  # layers after which the device is set to work while the host builds the rest of the pass


class _Launches(threading.local):
    are_on = True


_launches = _Launches()  # of this thread: another engine's may be traced at the same time


@contextmanager
def nothing_launched() -> Iterator[None]:
    """While a pass is traced there is nothing to set a device to work on."""
    before, _launches.are_on = _launches.are_on, False
    try:
        yield
    finally:
        _launches.are_on = before


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one layer stores for one cell."""

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
        """Apart from the cells."""
        return 0


@dataclass(frozen=True)
class GridPositions:
    """Three positions a token (time, row, column), for prompts with pictures: see models/mrope."""

    grid: mx.array  # int32 [3, rows, width]


Positions = mx.array | GridPositions  # an offset a row [rows], or every token's own


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


class Placement:
    """Where the rows of one forward pass stand in the buffers; shared by all layers of that pass.

    Starts and fed counts may be results of the device that the host has not read: it only needs to know
    `end`, a bound that no row's last fed cell goes beyond.
    """

    _by_positions: ClassVar[WeakValueDictionary[int, Placement]] = WeakValueDictionary()  # by their id

    def __init__(
        self,
        slots: Sequence[int],
        starts: mx.array,
        num_fed: mx.array,
        width: int,
        end: int,
        capacity: int,
        any_new: bool = True,
        positions: Positions | None = None,
        keeps_all: bool = False,
    ) -> None:
        if end > capacity:
            raise ValueError(f"a row would need {end} cells where the buffers have {capacity}")
        self.offset = starts  # [rows]
        self.num_fed = num_fed  # [rows]
        self.any_new = any_new  # whether a row may start at 0, with what another left in its slot
        self.keeps_all = keeps_all  # whether all that is fed stands, since no row has drafts
        self.positions = starts if positions is None else positions  # what rope is given
        self.added: Sequence[mx.array] = ()  # [rows, width, hidden] to be added after the first layers
        self.capacity = capacity
        view_step = VIEW_STEP if end <= LONG_VIEW else LONG_VIEW_STEP
        self.num_seen = min(capacity, -(-end // view_step) * view_step)
        self.slots = slots
        # Slots that follow each other are read without a copy.
        self.is_range = list(slots) == list(range(slots[0], slots[0] + len(slots)))
        self.slot_ids = mx.array(list(slots))[:, None]  # [rows, 1]
        columns = mx.arange(width)
        self.cells = starts[:, None] + columns  # [rows, width]
        self.fed = columns < num_fed[:, None]  # [rows, width] tokens, not padding
        # An array: a number would be built into compiled kernels, which then hold for one capacity only.
        self.limit = mx.arange(capacity, capacity + 1)
        own = mx.minimum(self.cells, self.limit)  # a row that recurses past its own depth may run over
        self.written = mx.where(self.fed, own, self.limit)  # [rows, width]
        self._masks: dict[int | None, mx.array] = {}
        self._shared: dict[Hashable, Any] = {}
        self._num_written = 0
        self._by_positions[id(self.positions)] = self

    @classmethod
    def at(cls, positions: object) -> Placement | None:
        """The pass whose positions these very ones are: for a rope, which is given nothing else."""
        return cls._by_positions.get(id(positions))  # no other object has this id while the pass lives

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """What all layers of the pass share, computed by the first that asks."""
        if key not in self._shared:
            self._shared[key] = compute()
        shared: T = self._shared[key]
        return shared

    def launch_now_and_then(self, kv: RaggedKV) -> None:
        """Called as each layer writes its cells."""
        self._num_written += 1
        if self._num_written % LAUNCH_EVERY == 0 and _launches.are_on:
            mx.async_eval(kv.keys, kv.values)

    def mask(self, window: int | None) -> mx.array:
        """Which cells each fed token sees: its own row's, up to itself.  [rows, 1, width, num_seen]"""
        if window not in self._masks:
            seen = mx.arange(self.num_seen)
            own = self.cells[:, None, :, None]
            mask = seen <= own
            if window is not None:
                # A padding column sees something too: attention over nothing would be NaN on some devices.
                mask = mask & (seen > mx.minimum(own, seen[-1:]) - window)
            self._masks[window] = mask
        return self._masks[window]

    def made(self, mask: mx.array) -> bool:
        """Whether a mask is one of this pass's own, as it was."""
        return any(mask is own for own in self._masks.values())


class LayerView:
    """What an attention layer sees of its buffers during one forward pass (mlx-lm's cache interface)."""

    def __init__(self, kv: RaggedKV, placement: Placement) -> None:
        self._kv = kv
        self.placement = placement
        self.offset: Positions = placement.positions

    @property
    def added(self) -> Sequence[mx.array]:
        """What pictures add to the hidden states: see models/deepstack."""
        return self.placement.added

    @property
    def keys(self) -> mx.array:
        return self._kv.keys

    @keys.setter
    def keys(self, _: mx.array) -> None:
        """Some models tie one layer's evaluation to another's here; every buffer is evaluated anyway."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        kv = self._kv
        kv.keys = self._write(kv.keys, keys)
        kv.values = self._write(kv.values, values)
        self.placement.launch_now_and_then(kv)
        return self._read(kv.keys), self._read(kv.values)

    def make_mask(
        self, width: int, return_array: bool = True, window_size: int | None = None, **_: object
    ) -> mx.array:
        return self.placement.mask(window_size or self._kv.spec.window)

    def _write(self, buffer: mx.array, new: mx.array) -> mx.array:
        place = self.placement
        if place.is_range and len(place.slots) == buffer.shape[0]:  # all slots: the cheaper write
            cells = mx.broadcast_to(place.written[:, None, :, None], new.shape)
            return mx.put_along_axis(buffer, cells, new, axis=2)
        buffer[place.slot_ids, :, place.written] = new.transpose(0, 2, 1, 3)
        return buffer

    def _read(self, buffer: mx.array) -> mx.array:
        place = self.placement
        if place.is_range:
            return buffer[place.slots[0] : place.slots[-1] + 1, :, : place.num_seen]
        return buffer[place.slot_ids[:, 0], :, : place.num_seen]


def _resized(buffer: mx.array, num_slots: int, num_cells: int) -> mx.array:
    old_slots, num_heads, old_cells, dim = buffer.shape
    if (old_slots, old_cells) == (num_slots, num_cells):
        return buffer
    slots, cells = min(old_slots, num_slots), min(old_cells, num_cells) - 1  # not the padding's cell
    grown = mx.zeros((num_slots, num_heads, num_cells, dim), buffer.dtype)
    if slots:
        grown[:slots, :, :cells] = buffer[:slots, :, :cells]
    mx.eval(grown)  # one layer at a time, so that old and new never stand side by side for all layers
    return grown


def exchanged(buffer: mx.array, source: int, target: int, one_way: bool) -> mx.array:
    """One slot's part of a buffer put into another's place, and back unless it is `one_way`."""
    if one_way:
        buffer[target] = buffer[source]
    else:
        pair = mx.array([target, source])
        buffer[pair] = buffer[mx.array([source, target])]
    return buffer
