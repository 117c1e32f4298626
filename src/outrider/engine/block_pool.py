"""The blocks of the row caches: which of them rows hold, and which hold cached prefixes. Pure Python, no MLX.

    block     0 zeros | 1 junk | 2 .......................... num_blocks - 1
    held by   no row  | no row | one row, or several rows that share a prefix, or none: free

A row writes blocks that it alone holds. A block is shared only when nothing in it will be written any more,
so nothing has to be copied when rows part. Every held block that has a cached block's content is known by the
cached block's id: a row that starts with the same text takes the block itself instead of a copy.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

from outrider.plan import NUM_SPARE_BLOCKS


class BlockPool:
    def __init__(self) -> None:
        self.num_blocks = 0  # with the spare ones; 0 before the first row
        self._num_holders: dict[int, int] = {}  # of every held block
        self._free: list[int] = []  # a heap: low blocks first
        self._holding: dict[int, int] = {}  # by a cached block's id: the block with its content
        self._content: dict[int, int] = {}  # the reverse

    @property
    def num_held(self) -> int:
        return len(self._num_holders)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A block for one row; a new one if none is free."""
        if not self._free:
            self.grow(max(self.num_blocks, NUM_SPARE_BLOCKS) + 1)
        block = heapq.heappop(self._free)
        self._num_holders[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more row holds a block."""
        self._num_holders[block] += 1

    def give_back(self, block: int) -> None:
        """A row no longer holds a block."""
        self._num_holders[block] -= 1
        if self._num_holders[block] == 0:
            del self._num_holders[block]
            heapq.heappush(self._free, block)
            self._holding.pop(self._content.pop(block, -1), None)

    def is_shared(self, block: int) -> bool:
        return self._num_holders[block] > 1

    def grow(self, num_blocks: int) -> None:
        """Have at least so many blocks."""
        first = max(self.num_blocks, NUM_SPARE_BLOCKS)
        for block in range(first, num_blocks):
            heapq.heappush(self._free, block)
        self.num_blocks = max(self.num_blocks, num_blocks)

    def compact(self, num_blocks: int, rows: Iterable[list[int]]) -> tuple[int, ...]:
        """Drop free blocks until `num_blocks` are left. Returns the blocks that stay, in their new order.

        The tables of all rows are changed.
        """
        held = sorted(self._num_holders)
        kept = (*range(NUM_SPARE_BLOCKS), *held)
        new = {block: number for number, block in enumerate(kept)}
        for table in rows:
            table[:] = [new[block] for block in table]
        self._num_holders = {new[block]: num for block, num in self._num_holders.items()}
        self._content = {new[block]: cached_id for block, cached_id in self._content.items()}
        self._holding = {cached_id: block for block, cached_id in self._content.items()}
        self._free, self.num_blocks = [], len(kept)
        self.grow(num_blocks)
        return kept

    def clear(self) -> None:
        """Forget all blocks. No row may hold one."""
        assert not self._num_holders, "a row holds blocks that are dropped"
        self.__init__()  # type: ignore[misc]

    # -- cached prefixes ---------------------------------------------------------------------------------

    def with_content(self, cached_id: int) -> int | None:
        """The held block that has a cached block's content, if there is one."""
        return self._holding.get(cached_id)

    def set_content(self, block: int, cached_id: int) -> None:
        """A held block has all cells of a cached block, and no row will write it again."""
        self._holding.pop(self._content.pop(block, -1), None)
        if (other := self._holding.get(cached_id)) is not None:
            del self._content[other]
        self._content[block], self._holding[cached_id] = cached_id, block

    def forget_content(self, cached_ids: Iterable[int]) -> None:
        """Cached blocks no longer exist."""
        for cached_id in cached_ids:
            self._content.pop(self._holding.pop(cached_id, -1), None)

    # -- self-check --------------------------------------------------------------------------------------

    def check_integrity(self, rows: Iterable[list[int]]) -> None:
        """Raise AssertionError unless exactly the rows' blocks are held, and every other one is free."""
        counted = Counter(block for table in rows for block in table)
        if counted != self._num_holders:
            raise AssertionError(f"blocks are held as {self._num_holders}, and rows have {dict(counted)}")
        places = sorted([*self._free, *self._num_holders])
        if self.num_blocks and places != list(range(NUM_SPARE_BLOCKS, self.num_blocks)):
            raise AssertionError("a block is lost, or held and free")
        if self._holding != {cached_id: block for block, cached_id in self._content.items()}:
            raise AssertionError("the contents of blocks are inconsistent")
        if not self._content.keys() <= self._num_holders.keys():
            raise AssertionError("a free block is taken for a cached one")
