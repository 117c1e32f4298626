"""Row caches whose cells are kept by blocks: every row has as many as it needs. Pure Python, no MLX.

`SlotCaches` (row_caches.py) has the same methods. Blocks are taken when a step is about to write them, and
given back when the row leaves. The caches have a few more blocks than are held: to change their size is to
copy them.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import replace

from outrider.engine.block_pool import BlockPool
from outrider.engine.row_caches import SLACK, CacheShape, next_cells
from outrider.engine.sequence import Sequence
from outrider.plan import NUM_SPARE_BLOCKS, CacheGeometry, RowPlan
from outrider.request import MAX_DEPTH
from outrider.speculate.shapes import ShapePolicy, num_slots_for

# Caches grow to what is needed and some room: one block for each row, as rows that came together end their
# blocks together; at least MIN_GROWTH, and one block in GROWTH_PARTS. They shrink after PATIENCE steps with
# more than twice this room. Chosen by hand.
GROWTH_PARTS, MIN_GROWTH = 8, 2
PATIENCE = 16


class BlockCaches:
    def __init__(self, geometry: CacheGeometry, budget_bytes: int, shapes: ShapePolicy | None = None) -> None:
        """`shapes`: where passes are traced, the caches have few sizes."""
        self._geometry = geometry
        self._shapes = shapes
        self.budget_bytes = budget_bytes
        self.pool = BlockPool()
        self.num_slots = 0
        self._num_wasteful_steps = 0  # in a row, with too many free blocks

    @property
    def shape(self) -> CacheShape:
        return CacheShape(self.num_slots, 0, self.pool.num_blocks)

    @property
    def num_bytes(self) -> int:
        return self._geometry.num_bytes_in_blocks(self.num_slots, self.pool.num_blocks)

    def clear(self) -> None:
        self.pool.clear()
        self.num_slots = self._num_wasteful_steps = 0

    # -- which rows fit ----------------------------------------------------------------------------------

    def longest_context(self) -> int:
        """Tokens that one row alone can hold within the budget."""
        assert self._geometry.block_size is not None
        return max(0, (self._max_blocks(1) - NUM_SPARE_BLOCKS) * self._geometry.block_size - SLACK)

    def may_join(self, sequence: Sequence, rows: Rows[Sequence]) -> bool:
        if not rows:
            return True  # one row alone fits: request validation has checked `longest_context`
        step = self._geometry.capacity_step  # room to grow, so that the new row is not preempted at once
        all_rows = (*rows, sequence)
        cells = [min(next_cells(row) + step, row.num_prompt + row.max_tokens + SLACK) for row in all_rows]
        return self._fits(len(all_rows), all_rows, cells)

    def resize(self, rows: Rows[Sequence], num_slots_used: int) -> bool:
        """Plan caches that are large enough for the next step of these rows; False if they do not fit."""
        if not rows:
            self.clear()
            return True
        cells = [next_cells(row) for row in rows]
        roomy = max(self.num_slots, num_slots_for(num_slots_used))
        found = next((num for num in (roomy, len(rows)) if self._fits(num, rows, cells)), None)
        if found is None and len(rows) > 1:
            return False
        self.num_slots = found or len(rows)
        return True

    def _fits(self, num_slots: int, rows: Rows[Sequence], cells: Rows[int]) -> bool:
        """Whether rows can have so many cells each, if none of the new ones can be shared."""
        num_more = sum(map(self._num_missing, rows, cells))
        return NUM_SPARE_BLOCKS + self.pool.num_held + num_more <= self._max_blocks(num_slots)

    def _num_missing(self, row: Sequence, num_cells: int) -> int:
        return max(0, self._geometry.blocks_for(num_cells) - len(row.blocks))

    def _max_blocks(self, num_slots: int) -> int:
        """Blocks that fit into the budget."""
        assert self._geometry.block_size is not None
        per_block = max(1, self._geometry.block_size * self._geometry.bytes_per_cell)
        return max(0, self.budget_bytes - num_slots * self._geometry.bytes_per_slot) // per_block

    # -- blocks of rows ----------------------------------------------------------------------------------

    def compact(self, rows: Rows[Sequence]) -> tuple[int, ...] | None:
        """Have fewer blocks, if too many have been free for some steps: see StepPlan.kept_blocks."""
        pool = self.pool
        num_needed = self._num_needed(rows)
        self._num_wasteful_steps += 1
        if pool.num_blocks <= num_needed + 2 * _room(num_needed, len(rows)):
            self._num_wasteful_steps = 0
        exceeds_budget = pool.num_blocks > self._max_blocks(self.num_slots) and pool.num_free > 0
        if not rows or not (exceeds_budget or self._num_wasteful_steps > PATIENCE):
            return None
        self._num_wasteful_steps = 0
        num_blocks = (
            NUM_SPARE_BLOCKS + pool.num_held if exceeds_budget else self._roomy(num_needed, len(rows))
        )
        if num_blocks >= pool.num_blocks:  # few sizes: the next smaller one is too small
            return None
        return pool.compact(num_blocks, [row.blocks for row in rows])

    def placed(self, batch: Rows[RowPlan], rows: Rows[Sequence]) -> list[RowPlan]:
        """The rows of a pass with the blocks that they need for it."""
        num_before = self.pool.num_blocks
        by_id = {row.id: row for row in rows}
        placed = [self._extended(planned, by_id[planned.sequence_id]) for planned in batch]
        if self.pool.num_blocks > num_before:  # room for the rest of these rows' prompts, too
            num_needed = self._num_needed([by_id[planned.sequence_id] for planned in batch])
            self.pool.grow(self._roomy(num_needed, len(rows)))
        return placed

    def _extended(self, planned: RowPlan, row: Sequence) -> RowPlan:
        self.extend(row, planned.start + planned.num_fed + MAX_DEPTH)
        has_all = len(planned.blocks) == len(row.blocks)
        return planned if has_all else replace(planned, blocks=tuple(row.blocks))

    def _num_needed(self, rows: Iterable[Sequence]) -> int:
        """Blocks for what all rows hold, and for what these rows will hold before they sample."""
        num_more = sum(self._num_missing(row, next_cells(row)) for row in rows)
        return NUM_SPARE_BLOCKS + self.pool.num_held + num_more

    def extend(self, row: Sequence, num_cells: int) -> None:
        """Give a row blocks for so many cells."""
        row.blocks += [self.pool.take() for _ in range(self._num_missing(row, num_cells))]

    def may_overlap(self, rows: Iterable[tuple[Sequence, RowPlan]]) -> bool:
        """Whether the rows of a step in flight can take one more step in the caches as they are."""
        cells = [(row, row.num_cached + planned.num_fed + 1 + SLACK) for row, planned in rows]
        if sum(self._num_missing(row, num) for row, num in cells) > self.pool.num_free:
            return False
        for row, num in cells:
            self.extend(row, num)
        return True

    def leave(self, sequence: Sequence) -> None:
        """A row gives up its blocks."""
        for block in sequence.blocks:
            self.pool.give_back(block)
        sequence.blocks = []

    def check_integrity(self, rows: Rows[Sequence]) -> None:
        self.pool.check_integrity([row.blocks for row in rows])
        if any(self._num_missing(row, row.num_cached) for row in rows):
            raise AssertionError("a row has more cells than blocks")

    def _roomy(self, num_needed: int, num_rows: int) -> int:
        """Some more blocks than are needed, if the budget allows it."""
        roomy = num_needed + _room(num_needed, num_rows)
        if self._shapes is not None:
            roomy = self._shapes.num_blocks(roomy)
        return max(num_needed, min(roomy, self._max_blocks(self.num_slots)))


def _room(num_needed: int, num_rows: int) -> int:
    return max(MIN_GROWTH, num_rows, num_needed // GROWTH_PARTS)
