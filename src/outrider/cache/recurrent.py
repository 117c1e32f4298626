"""States of recurrent layers: per slot one value of each part (a matrix, a convolution's window), no cells.

A state cannot be cut back, so a pass with drafts does not write it. A layer reads the rows' states, and says
for each part how the new one follows from the number of tokens that a row keeps. Once drafts are accepted,
`commit` asks for just that one and writes it:

    state after x0..x(start-1)  --pass over fed tokens-->  outputs, and choose(kept) -> state
                                                           commit: slot <- choose(kept)

Where no row has drafts, what it keeps is what it is fed: the states are written as the layers run, and the
commit finds nothing to do.

A row that starts at 0 reads zeros, whoever had its slot before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from outrider.cache.ragged_kv import Placement, exchanged


class Kept:
    """How many tokens each row of a pass keeps, and what its layers make of that, once for all of them."""

    def __init__(self, num: mx.array) -> None:
        self.num = num  # [rows]
        self._columns: dict[int, mx.array] = {}

    def columns(self, num: int) -> mx.array:
        """The `num` columns from each row's first that is not kept.  [rows, num, 1]"""
        if num not in self._columns:
            self._columns[num] = (self.num[:, None] + mx.arange(num))[..., None]
        return self._columns[num]

    def wait_for(self, arrays: list[mx.array]) -> None:
        """From now on nothing of this is known before these arrays are.

        So new states are made one after the other: side by side they would take more memory.
        """
        num, *columns = mx.depends([self.num, *self._columns.values()], arrays)
        self.num, self._columns = num, dict(zip(self._columns, columns, strict=True))


Choose = Callable[[Kept], mx.array]  # -> the part's new value for every row
ChooseParts = Callable[[Kept], Sequence[mx.array]]  # -> that of every part


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
        self._choices: list[tuple[tuple[int, ...], ChooseParts]] = []
        self._said: set[int] = set()  # parts of which the layer has said how they go on

    @property
    def fed(self) -> mx.array:
        """Which columns are tokens, not padding.  [rows, width]"""
        return self._placement.fed

    @property
    def num_fed(self) -> mx.array:
        return self._placement.num_fed

    @property
    def keeps_all(self) -> bool:
        """Whether every row keeps what it is fed, so that its state after the pass is known within it."""
        return self._placement.keeps_all

    def make_mask(self, width: int) -> mx.array:
        return self.fed

    def advance(self, num: int) -> None:
        """Part of the interface of mlx-lm's caches. Nothing here counts."""

    def __getitem__(self, index: int) -> mx.array:
        """The rows' states before the pass; to be read before `keep`.  [rows, …]"""
        place = self._placement
        rows = _rows_of(self._state.parts[index], place)
        if not place.any_new:
            return rows  # the states themselves: a copy of every layer's would live until the commit
        is_new = (place.offset == 0).reshape(-1, *[1] * (rows.ndim - 1))
        return mx.where(is_new, mx.zeros((), rows.dtype), rows)

    def keep(self, index: int, choose: Choose) -> None:
        """Say how a part's new value follows from the number of tokens kept."""
        self._keep((index,), lambda kept: [choose(kept)])

    def keep_parts(self, choose: ChooseParts) -> None:
        """Say it of all parts together."""
        self._keep(tuple(range(len(self._state.parts))), choose)

    def _keep(self, indices: tuple[int, ...], choose: ChooseParts) -> None:
        self._said.update(indices)
        if self.keeps_all:
            self._write(indices, choose, self._placement.once(Kept, lambda: Kept(self.num_fed)))
        else:
            self._choices.append((indices, choose))

    def commit(self, kept: Kept) -> None:
        """Write the new states that the layer has not written."""
        num_parts = len(self._state.parts)
        if len(self._said) != num_parts:
            raise ValueError(f"a layer kept {len(self._said)} of its {num_parts} states per row")
        for indices, choose in self._choices:
            self._write(indices, choose, kept)
        self._choices = []

    def _write(self, indices: tuple[int, ...], choose: ChooseParts, kept: Kept) -> None:
        parts = self._state.parts
        for index, rows in zip(indices, choose(kept), strict=True):
            parts[index] = _written(parts[index], rows, self._placement)
        kept.wait_for([parts[index] for index in indices])


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
