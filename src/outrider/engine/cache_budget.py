"""How large the caches are, and who fits into them within their budget. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from outrider.config import CacheGeometry
from outrider.engine.sequence import Sequence
from outrider.request import MAX_DEPTH
from outrider.speculate.shapes import Shapes, row_count

SLACK = 2 * MAX_DEPTH  # cells past a row's tokens that a step may touch: its drafts and the head's recursion


class CacheBudget:
    def __init__(self, geometry: CacheGeometry, budget_bytes: int, shapes: Shapes) -> None:
        self._geometry = geometry
        self._shapes = shapes
        self.budget_bytes = budget_bytes
        self.num_slots = self.capacity = 0  # of the caches, as last planned

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_slots, self.capacity

    @property
    def num_bytes(self) -> int:
        return self._geometry.num_bytes(*self.shape)

    def clear(self) -> None:
        self.num_slots = self.capacity = 0

    def longest_context(self) -> int:
        """Tokens that a row alone can hold within the budget."""
        page = self._geometry.capacity_step
        per_slot = self.budget_bytes - self._geometry.num_bytes(1, 0)
        cells = per_slot // max(1, self._geometry.bytes_per_cell) // page * page
        return max(0, cells - SLACK)

    def may_join(self, sequence: Sequence, rows: Rows[Sequence]) -> bool:
        if not rows:
            return True  # a row alone fits: `longest_context` is checked at the door
        page = self._geometry.capacity_step  # room to grow, so that the last to join is not sent back at once
        cells = max(min(_cells(row) + page, _most_cells(row)) for row in (*rows, sequence))
        return self._fits(len(rows) + 1, self._geometry.capacity_for(cells))

    def make(self, rows: Rows[Sequence], num_spanned: int) -> bool:
        """Be large enough for the next step of these rows, in so many slots; False if they do not fit.

        Roomier than that where it fits, since another size is slow to begin with.
        """
        if not rows:
            self.clear()
            return True
        capacity = self._geometry.capacity_for(max(_cells(row) for row in rows))
        slots = max(self.num_slots, row_count(num_spanned))
        grown = self._shapes.capacity(capacity, self._geometry.capacity_step)
        roomy = [
            (slots, max(self.capacity, cells)) for cells in (self._geometry.capacity_for(grown), capacity)
        ]
        bare = len(rows), capacity
        found = next((shape for shape in (*roomy, bare) if self._fits(*shape)), None)
        if found is None and len(rows) > 1:
            return False
        self.num_slots, self.capacity = found or bare
        return True

    def may_overlap(self, most_cells: int) -> bool:
        """Whether rows of so many cells can take another step in it."""
        return most_cells + SLACK <= self.capacity

    def _fits(self, num_slots: int, capacity: int) -> bool:
        return self._geometry.num_bytes(num_slots, capacity) <= self.budget_bytes


def _cells(sequence: Sequence) -> int:
    """Cells that a row's next step may touch."""
    return max(sequence.num_prefill, len(sequence.tokens)) + SLACK


def _most_cells(sequence: Sequence) -> int:
    """Cells that a row can ever touch."""
    return sequence.num_prompt + sequence.max_tokens + SLACK
