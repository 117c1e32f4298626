"""The copies between rows and cached blocks that the next plan carries. Pure Python, no decisions.

    saves    a row's cells into a cached block        states   a row's recurrent state into a cached one
    loads    cached blocks into a row's cells         held     blocks that the loads read: not to be evicted

Where rows keep their cells by blocks (engine/block_pool.py), a cached block that a row has too is shared with
the row that loads it, instead of copied. It must be final: whole, and never written again.
"""

from __future__ import annotations

from collections.abc import Iterable

from outrider.cache.prefix_index import Node, PrefixIndex, PrefixMatch
from outrider.engine.block_pool import BlockPool
from outrider.engine.sequence import Sequence
from outrider.plan import Arrival, BlockPiece, LoadCells, PrefixCopies, SaveCells, SaveState


class PendingCopies:
    """One plan's copies: collected until `take`, each of them handed out once."""

    def __init__(self, index: PrefixIndex, max_cells: int) -> None:
        """`max_cells`: that one plan may load, and as many that it may save."""
        self.saves: list[SaveCells] = []
        self.states: list[SaveState] = []
        self.loads: list[LoadCells] = []
        self.pool: BlockPool | None = None  # the rows' blocks, where they keep their cells by blocks
        self._index = index
        self._max_cells = max_cells
        self._held: list[Node] = []

    def __bool__(self) -> bool:
        return bool(self.saves or self.states or self.loads or self._index.has_dropped)

    # -- loads -------------------------------------------------------------------------------------------

    def end_of_load(self, match: PrefixMatch, start: int, end: int) -> int:
        """Where a load from `start` to `end` has to stop so that the plan copies no more cells than it may.

        Shared blocks cost nothing.
        """
        space = self._max_cells - sum(load.num_cells for load in self.loads)
        cell = start
        for piece in match.pieces(start, end):
            num_cells = piece.last - piece.first
            is_shared = self.pool is not None and self.pool.with_content(piece.block_id) is not None
            num_copied = 0 if is_shared else min(num_cells, space)
            if not is_shared and num_copied < num_cells:
                return cell + num_copied
            cell, space = cell + num_cells, space - num_copied
        return max(cell, end)

    def load(
        self, row: Sequence, start: int, pieces: tuple[BlockPiece, ...], last: Node, state_id: int | None
    ) -> None:
        """Fill the row's cells from `start` on with `pieces`, whose last block is `last`."""
        assert row.slot is not None
        self._index.hold(last)
        self._held.append(last)
        if self.pool is None:
            self.loads.append(LoadCells(row.slot, start, pieces, state_id))
            return
        copied = self._share(row, start, pieces, self.pool)
        if copied or state_id is not None:
            own, own_pieces = tuple(block for block, _ in copied), tuple(piece for _, piece in copied)
            self.loads.append(LoadCells(row.slot, start, own_pieces, state_id, own))

    def _share(
        self, row: Sequence, start: int, pieces: tuple[BlockPiece, ...], pool: BlockPool
    ) -> list[tuple[int, BlockPiece]]:
        """Give the row blocks for all pieces. Returns those that have to be copied, with the row's block."""
        size = self._index.block_size
        copied: list[tuple[int, BlockPiece]] = []
        for number, piece in enumerate(pieces, start // size):
            is_final = (piece.first, piece.last) == (0, size) and (number + 1) * size <= row.first_open
            held = pool.with_content(piece.block_id) if is_final else None
            if held is not None and number >= len(row.blocks):
                assert number == len(row.blocks)
                pool.share(held)
                row.blocks.append(held)
                continue
            if number == len(row.blocks):
                row.blocks.append(pool.take())
            copied.append((row.blocks[number], piece))
            if is_final:
                pool.set_content(row.blocks[number], piece.block_id)
        return copied

    # -- saves -------------------------------------------------------------------------------------------

    def has_room_for(self, num_cells: int) -> bool:
        """Whether the plan may save so many cells more."""
        return sum(save.end - save.start for save in self.saves) + num_cells <= self._max_cells

    def save(self, row: Sequence, node: Node, start: int, end: int, file_name: str | None) -> None:
        """Save the row's cells start..end-1 as `node`. A final block may be shared from now on."""
        assert row.slot is not None
        size = self._index.block_size
        row_block = None if self.pool is None else row.blocks[start // size]
        self.saves.append(SaveCells(node.block_id, row.slot, start, end, file_name, row_block))
        is_final = end - start == size and end <= row.first_open
        if self.pool is not None and row_block is not None and is_final:
            self.pool.set_content(row_block, node.block_id)

    # -- plans -------------------------------------------------------------------------------------------

    def take(self, arrivals: Iterable[Arrival]) -> PrefixCopies:
        """What the next step copies and frees; `arrivals`: blocks that came from the disk."""
        dropped = self._index.take_dropped()
        gone = set(dropped)
        if self.pool is not None:
            self.pool.forget_content(dropped)
        copies = PrefixCopies(
            tuple(dropped),
            tuple(save for save in self.saves if save.block_id not in gone),
            tuple(save for save in self.states if save.state_id not in gone),
            tuple(arrival for arrival in arrivals if arrival.id not in gone),
            tuple(self.loads),
        )
        self.clear()
        return copies

    def clear(self) -> None:
        self.saves, self.states, self.loads = [], [], []
        for node in self._held:
            self._index.release(node)
        self._held.clear()
