"""States of recurrent layers: for each slot one value of each part (conv state, recurrent state), no cells.

A state cannot be cut back, so a pass with drafts does not write it. A layer reads the rows' states and
registers a function for each part. The function computes the new state from the number of tokens that each
row commits. Once drafts are accepted, `commit` calls the functions and writes their results:

    state after x0..x(start-1)  --pass over fed tokens-->  outputs, and state_after(counts) -> state
                                                           commit: slot <- state_after(counts)

Where no row has drafts, a row commits all tokens that it is fed. The states are then written while the layers
run, and `commit` has nothing to do.

A row that starts at 0 reads zeros, whatever its slot held before.

The tokens of an overlapped step may turn out to be void (StepPlan.keeps_states). The arrays from before the
step are then still there (`version`), and a slot gets its old states back (`restore`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from outrider.cache.cell_buffer import exchanged
from outrider.cache.placement import CommitCounts, Placement

StateAfter = Callable[[CommitCounts], mx.array]  # -> the new value of one part for every row
StatesAfter = Callable[[CommitCounts], Sequence[mx.array]]  # -> the new values of several parts


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state that one layer stores for one row: the shape and dtype of every part."""

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

    def version(self) -> list[mx.array]:
        """The states as they are now, for `restore`. Later passes then write into new buffers."""
        return [part[:] for part in self.parts]  # other objects: a pass may assign to the elements of a part

    def restore(self, slot: int, version: Sequence[mx.array]) -> None:
        """Give a slot the states that it has in a version."""
        for part, before in zip(self.parts, version, strict=True):
            part[slot] = before[slot]

    def resize(self, num_slots: int, capacity: int) -> None:
        self.parts = [_resized(part, num_slots) for part in self.parts]

    def exchange(self, source: int, target: int, one_way: bool) -> None:
        self.parts = [exchanged(part, source, target, one_way) for part in self.parts]


class StateView:
    """A recurrent layer's states during one pass."""

    def __init__(self, state: RecurrentState, placement: Placement) -> None:
        self._state = state
        self._placement = placement
        self._pending: list[tuple[tuple[int, ...], StatesAfter]] = []  # parts, and what computes them
        self._registered: set[int] = set()  # parts for which the layer has called on_commit

    @property
    def fed(self) -> mx.array:
        """True for tokens, False for padding.  [rows, width]"""
        return self._placement.fed

    @property
    def num_fed(self) -> mx.array:
        return self._placement.num_fed

    @property
    def commits_all(self) -> bool:
        """True if every row commits all tokens that it is fed, so that the pass can write the new state."""
        return self._placement.commits_all

    def make_mask(self, width: int) -> mx.array:
        return self.fed

    def advance(self, num: int) -> None:
        """Does nothing: mlx-lm's caches count tokens here, and a StateView has no length."""

    def __getitem__(self, index: int) -> mx.array:
        """The rows' states before the pass, to be read before `on_commit`.  [rows, …]"""
        place = self._placement
        rows = _rows_of(self._state.parts[index], place)
        if not place.any_new:
            return rows  # a view: copies of all layers' states would live until the commit
        is_new = (place.starts == 0).reshape(-1, *[1] * (rows.ndim - 1))
        return mx.where(is_new, mx.zeros((), rows.dtype), rows)

    def on_commit(self, index: int, state_after: StateAfter) -> None:
        """Register the function that computes one part's new value from the committed token counts."""
        self._register((index,), lambda counts: [state_after(counts)])

    def on_commit_all(self, states_after: StatesAfter) -> None:
        """Register one function that computes the new values of all parts."""
        self._register(tuple(range(len(self._state.parts))), states_after)

    def _register(self, indices: tuple[int, ...], states_after: StatesAfter) -> None:
        self._registered.update(indices)
        if self.commits_all:
            self._write(indices, states_after, self._placement.fed_counts)
            if self._placement.is_wide and len(self._registered) == len(self._state.parts):
                self._placement.launch_every_few_layers(*self._state.parts)
        else:
            self._pending.append((indices, states_after))

    def commit(self, counts: CommitCounts) -> None:
        """Write the new states that were not written during the pass."""
        num_parts = len(self._state.parts)
        if len(self._registered) != num_parts:
            raise ValueError(f"a recurrent layer updated {len(self._registered)} of its {num_parts} states")
        for indices, states_after in self._pending:
            self._write(indices, states_after, counts)
        self._pending = []

    def _write(self, indices: tuple[int, ...], states_after: StatesAfter, counts: CommitCounts) -> None:
        parts = self._state.parts
        for index, rows in zip(indices, states_after(counts), strict=True):
            parts[index] = _written(parts[index], rows, self._placement)
        counts.wait_for([parts[index] for index in indices])


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
    if num_slots == 0:  # after a pass that failed the arrays cannot be read
        return _zeros(0, part.shape[1:], part.dtype)
    if num_slots < old_slots:
        resized = mx.contiguous(part[:num_slots])
    else:
        resized = mx.concatenate([part, _zeros(num_slots - old_slots, part.shape[1:], part.dtype)])
    mx.eval(resized)  # one layer at a time; no view of the old buffer remains
    return resized
