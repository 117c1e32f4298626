"""The prefix cache of an engine that has none: the same methods as PrefixCache, and no effect.

So the scheduler needs no check whether prefixes are cached.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

from outrider.engine.block_pool import BlockPool
from outrider.engine.sequence import Sequence
from outrider.plan import PrefixCopies, RowPlan
from outrider.request import MAX_DEPTH


class NoPrefixCache:
    num_bytes = 0
    has_copies = False

    def use_blocks(self, pool: BlockPool | None, block_size: int | None) -> None:
        pass

    def ready_rows(self, prefilling: Rows[Sequence]) -> list[Sequence]:
        return list(prefilling)

    def chunk_end(self, row: Sequence, end: int) -> int:
        return end

    def max_drafts(self, row: Sequence, in_flight: RowPlan | None = None) -> int:
        return MAX_DEPTH

    def may_end_block(self, row: Sequence, num_fed: int) -> bool:
        return False

    def save(self, row: Sequence, *, to_end: bool = False) -> None:
        pass

    def save_before_leaving(self, row: Sequence) -> None:
        pass

    def leave(self, row: Sequence) -> None:
        pass

    def clear(self) -> None:
        pass

    def take_copies(self) -> PrefixCopies:
        return PrefixCopies()

    def wait_for_disk(self, timeout_s: float) -> None:
        pass

    def check_integrity(self) -> None:
        pass
