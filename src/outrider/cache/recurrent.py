"""States of recurrent layers: per slot one value of each part (a matrix, a convolution's window), no cells.

A state cannot be cut back, so a pass does not write it. A layer reads the rows' states, and says for each
part how the new one follows from the number of tokens that a row keeps. Once drafts are accepted, `commit`
asks for just that one and writes it:

    state after x0..x(start-1)  --pass over fed tokens-->  outputs, and choose(num_kept) -> state
                                                           commit: slot <- choose(num_kept)

A row that starts at 0 reads zeros, whoever had its slot before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from outrider.cache.ragged_kv import Placement, exchanged

Choose = Callable[[mx.array], mx.array]  # num_kept [rows] -> the part's new value for every row


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What one layer keeps for one row: the shape and dtype of every part."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]

    @property
    def bytes_per_cell(self) -> int:
        return 0

    @property
    def bytes_per_slot(self) -> int:
        sizes = zip(self.shapes, self.dtypes, strict=True)
        return sum(math.prod(shape) * dtype.size for shape, dtype in sizes)


class RecurrentState:
    """The states of one layer, `[slots, …]` for each part."""

    def __init__(self, spec: StateSpec) -> None:
        self.spec = spec
        self.parts = [_zeros(0, *part) for part in zip(spec.shapes, spec.dtypes, strict=True)]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def arrays(self) -> list[mx.array]:
        return self.parts

    def put(self, arrays: Sequence[mx.array]) -> None:
        self.parts = list(arrays)

    def resize(self, num_slots: int, capacity: int) -> None:
        self.parts = [_resized(part, num_slots) for part in self.parts]

    def exchange(self, source: int, target: int, one_way: bool) -> None:
        self.parts = [exchanged(part, source, target, one_way) for part in self.parts]


class StateView:
    """What a recurrent layer sees of its states during one pass."""

    def __init__(self, state: RecurrentState, placement: Placement) -> None:
        self._state = state
        self._placement = placement
        self._choices: dict[int, Choose] = {}

    @property
    def fed(self) -> mx.array:
        """Which columns are tokens, not padding.  [rows, width]"""
        return self._placement.fed

    def make_mask(self, width: int) -> mx.array:
        return self.fed

    def advance(self, num: int) -> None:
        """Part of the interface of mlx-lm's caches. Nothing here counts."""

    def __getitem__(self, index: int) -> mx.array:
        """The rows' states before the pass.  [rows, …]"""
        place = self._placement
        rows = _rows_of(self._state.parts[index], place)
        if not place.any_new:
            return rows  # the states themselves: a copy of every layer's would live until the commit
        is_new = (place.offset == 0).reshape(-1, *[1] * (rows.ndim - 1))
        return mx.where(is_new, mx.zeros((), rows.dtype), rows)

    def keep(self, index: int, choose: Choose) -> None:
        """Say how a part's new value follows from the number of tokens kept."""
        self._choices[index] = choose

    def commit(self, num_kept: mx.array) -> list[mx.array]:
        """Write the new states, and return them."""
        parts = self._state.parts
        if len(self._choices) != len(parts):
            raise ValueError(f"a layer kept {len(self._choices)} of its {len(parts)} states per row")
        for index, choose in self._choices.items():
            parts[index] = _written(parts[index], choose(num_kept), self._placement)
        self._choices = {}
        return parts


def _zeros(num_slots: int, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.zeros((num_slots, *shape), dtype)


def _rows_of(part: mx.array, place: Placement) -> mx.array:
    if place.is_range:
        return part[place.slots[0] : place.slots[-1] + 1]
    return part[place.slot_ids[:, 0]]


def _written(part: mx.array, rows: mx.array, place: Placement) -> mx.array:
    rows = rows.astype(part.dtype)
    if rows.shape == part.shape and place.is_range:
        return rows
    part[place.slot_ids[:, 0]] = rows
    return part


def _resized(part: mx.array, num_slots: int) -> mx.array:
    old_slots = part.shape[0]
    if num_slots == old_slots:
        return part
    if num_slots == 0:  # what is there may be of a pass that failed: nothing of it can be read
        return _zeros(0, part.shape[1:], part.dtype)
    if num_slots < old_slots:
        resized = mx.contiguous(part[:num_slots])
    else:
        resized = mx.concatenate([part, _zeros(num_slots - old_slots, part.shape[1:], part.dtype)])
    mx.eval(resized)  # one layer at a time, and no view of the old buffer remains
    return resized
