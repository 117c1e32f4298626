"""The row caches: which slot each sequence has, how large the caches are, and which rows fit. Pure Python.

    slots   0 ........ D-1 | D ......... D+P-1 | D+P ....
            decoding       | prefilling        | free

A slot is a sequence's row in the cache buffers. Decoding rows come first and without gaps, so that their
forward pass reads the buffers in place. A row that leaves is replaced by one other row; the rest stay.

Cells are kept by slots (`SlotCaches`) or by blocks (`BlockCaches`, block_caches.py). With blocks a slot holds
recurrent states only, and nothing moves in a model that has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from typing import NamedTuple

from outrider.engine.block_pool import BlockPool
from outrider.engine.sequence import Sequence
from outrider.plan import CacheGeometry, Move, RowPlan
from outrider.request import MAX_DEPTH
from outrider.speculate.shapes import ShapePolicy, num_slots_for

SLACK = 2 * MAX_DEPTH  # cells past a row's tokens that a step may write: its drafts and the head's recursion


class CacheShape(NamedTuple):
    """The fields of a StepPlan that say how large the caches are."""

    num_slots: int = 0
    capacity: int = 0
    num_blocks: int = 0


class SlotCaches:
    """Every slot has as many cells as the longest row needs."""

    pool: BlockPool | None = None  # cells are in no blocks

    def __init__(self, geometry: CacheGeometry, budget_bytes: int, shapes: ShapePolicy) -> None:
        self._geometry = geometry
        self._shapes = shapes
        self.budget_bytes = budget_bytes
        self.num_slots = self.capacity = 0  # of the caches, as last planned

    @property
    def shape(self) -> CacheShape:
        return CacheShape(self.num_slots, self.capacity)

    @property
    def num_bytes(self) -> int:
        return self._geometry.num_bytes(self.num_slots, self.capacity)

    def clear(self) -> None:
        self.num_slots = self.capacity = 0

    def longest_context(self) -> int:
        """Tokens that one row alone can hold within the budget."""
        step = self._geometry.capacity_step
        per_slot = self.budget_bytes - self._geometry.num_bytes(1, 0)
        cells = per_slot // max(1, self._geometry.bytes_per_cell) // step * step
        return max(0, cells - SLACK)

    def may_join(self, sequence: Sequence, rows: Rows[Sequence]) -> bool:
        if not rows:
            return True  # one row alone fits: request validation has checked `longest_context`
        step = self._geometry.capacity_step  # room to grow, so that the new row is not preempted at once
        max_cells = [row.num_prompt + row.max_tokens + SLACK for row in (*rows, sequence)]
        grown_cells = [next_cells(row) + step for row in (*rows, sequence)]
        cells = max(map(min, grown_cells, max_cells))
        return self._fits(len(rows) + 1, self._geometry.capacity_for(cells))

    def resize(self, rows: Rows[Sequence], num_slots_used: int) -> bool:
        """Plan caches that are large enough for the next step of these rows; False if they do not fit.

        The caches get spare cells and slots if the budget allows it, since every new shape is slow at first.
        """
        if not rows:
            self.clear()
            return True
        capacity = self._geometry.capacity_for(max(next_cells(row) for row in rows))
        num_slots = max(self.num_slots, num_slots_for(num_slots_used))
        grown = self._geometry.capacity_for(self._shapes.capacity(capacity, self._geometry.capacity_step))
        roomy = [(num_slots, max(self.capacity, cells)) for cells in (grown, capacity)]
        tight = len(rows), capacity
        found = next((shape for shape in (*roomy, tight) if self._fits(*shape)), None)
        if found is None and len(rows) > 1:
            return False
        self.num_slots, self.capacity = found or tight
        return True

    def may_overlap(self, rows: Iterable[tuple[Sequence, RowPlan]]) -> bool:
        """Whether the rows of a step in flight can take one more step in the caches as they are."""
        return max(row.num_cached + planned.num_fed for row, planned in rows) + SLACK <= self.capacity

    def compact(self, rows: Rows[Sequence]) -> tuple[int, ...] | None:
        return None  # there are no blocks

    def placed(self, batch: Rows[RowPlan], rows: Rows[Sequence]) -> list[RowPlan]:
        """The rows of a pass with their blocks: there are none."""
        return list(batch)

    def leave(self, sequence: Sequence) -> None:
        """A row gives up its cells: they are its slot's."""

    def check_integrity(self, rows: Rows[Sequence]) -> None:
        if any(row.num_cached > self.capacity for row in rows):
            raise AssertionError("a row has more cells than the buffers")

    def _fits(self, num_slots: int, capacity: int) -> bool:
        return self._geometry.num_bytes(num_slots, capacity) <= self.budget_bytes


def next_cells(sequence: Sequence) -> int:
    """Cells that a row's next step may write."""
    return max(sequence.num_prefill, len(sequence.tokens) - sequence.num_skipped) + SLACK


class SlotTable:
    def __init__(self) -> None:
        self._rows: list[Sequence | None] = []

    def __len__(self) -> int:
        return sum(row is not None for row in self._rows)

    @property
    def num_spanned(self) -> int:
        """One more than the highest slot in use."""
        return max((slot + 1 for slot, row in enumerate(self._rows) if row is not None), default=0)

    def sequences(self) -> Iterable[Sequence]:
        return (row for row in self._rows if row is not None)

    def join(self, sequence: Sequence) -> None:
        slot = next((i for i, row in enumerate(self._rows) if row is None), len(self._rows))
        if slot == len(self._rows):
            self._rows.append(None)
        self._rows[slot] = sequence
        sequence.slot = slot

    def leave(self, sequence: Sequence) -> None:
        assert sequence.slot is not None and self._rows[sequence.slot] is sequence
        self._rows[sequence.slot] = None
        sequence.slot = None

    def settle(self) -> list[Move]:
        """Bring decoding rows to the front and close the gaps. Returns the moves of their cells, in order."""
        rows = list(self.sequences())
        num_decoding = sum(row.is_decoding for row in rows)
        moves = self._fill(0, num_decoding, [row for row in rows if row.is_decoding])
        moves += self._fill(num_decoding, len(rows), [row for row in rows if not row.is_decoding])
        del self._rows[len(rows) :]
        return moves

    def _fill(self, low: int, high: int, members: list[Sequence]) -> list[Move]:
        """Make slots low..high-1 hold exactly the members. Members that are there already do not move."""
        inside = {id(row) for row in members}
        strays = [row for row in members if not low <= _slot(row) < high]
        moves = []
        for slot in range(low, high):
            held = self._rows[slot]
            if held is not None and id(held) in inside:
                continue
            moves += self._swap(_slot(strays.pop()), slot)
        return moves

    def _swap(self, source: int, target: int) -> list[Move]:
        mover, held = self._rows[source], self._rows[target]
        assert mover is not None
        self._rows[source], self._rows[target] = held, mover
        mover.slot = target
        if held is not None:
            held.slot = source
        if mover.num_cached == 0 and (held is None or held.num_cached == 0):
            return []  # neither row has cached cells
        return [Move(source, target, one_way=held is None or held.num_cached == 0)]


def _slot(row: Sequence) -> int:
    assert row.slot is not None
    return row.slot
