"""Which sequences have a row: who starts, who is preempted, who leaves. Pure Python.

    waiting (waiting_queue.py) -> running, in a slot, as long as it fits into memory -> finished
             ^--------- preempted or failed: cells dropped, tokens stay ---'

Owns the queue and the slots. How large the caches are and which rows fit is decided in row_caches.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from outrider.engine.block_caches import BlockCaches
from outrider.engine.prefill_queue import PrefillQueue
from outrider.engine.prefix.cache import PrefixCache
from outrider.engine.prefix.no_cache import NoPrefixCache
from outrider.engine.row_caches import CacheShape, SlotCaches, SlotTable
from outrider.engine.sequence import Sequence
from outrider.engine.waiting_queue import WaitingQueue
from outrider.plan import Move, RestoreState


@dataclass(frozen=True)
class Arrangement:
    """What a plan does to the caches before its passes."""

    moves: tuple[Move, ...]
    kept_blocks: tuple[int, ...] | None  # see StepPlan
    shape_before: CacheShape

    def changes(self, shape: CacheShape) -> bool:
        """`shape`: of the caches in the plan."""
        return bool(self.moves) or self.kept_blocks is not None or self.shape_before != shape


class RunningRows:
    """The sequences that have a slot, in the order of their slots, and those that wait for one."""

    def __init__(
        self,
        caches: SlotCaches | BlockCaches,
        max_rows: int,
        prefix: PrefixCache | NoPrefixCache,
        prefill_queue: PrefillQueue,
        moves_cells: bool,
    ) -> None:
        """`moves_cells`: a row that changes its slot takes cells or states with it."""
        self.max_rows = max_rows
        self._caches = caches
        self._prefix = prefix
        self._prefill_queue = prefill_queue
        self._moves_cells = moves_cells
        self._waiting = WaitingQueue()
        self._slots = SlotTable()

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._slots.sequences())

    @property
    def waiting(self) -> WaitingQueue:
        return self._waiting

    def arrange(self) -> Arrangement:
        """Let rows start and preempt rows, until the caches fit; then give the rows their places."""
        self._start_waiting()
        shape_before = self._caches.shape
        self._preempt_until_fit()
        kept_blocks = self._caches.compact(list(self))
        moves = self._slots.settle()
        moves = moves if self._moves_cells else []
        return Arrangement(tuple(moves), kept_blocks, shape_before)

    def take_restores(self) -> tuple[RestoreState, ...]:
        """The rows that were rolled back get their earlier states with the next step."""
        rows = [(row, row.slot) for row in self if row.state_age]
        restores = tuple(RestoreState(slot, row.state_age) for row, slot in rows if slot is not None)
        for row, _ in rows:
            row.state_age = 0
        return restores

    def _start_waiting(self) -> None:
        while self.can_start_next():
            sequence = self._waiting.take()
            self._slots.join(sequence)
            self._prefill_queue.add(sequence)
            if sequence.counters.started_s is None:
                sequence.counters.started_s = time.perf_counter()

    def can_start_next(self) -> bool:
        upcoming = self._waiting.next
        if upcoming is None or len(self) >= self.max_rows:
            return False
        return self._caches.may_join(upcoming, list(self))

    def _preempt_until_fit(self) -> None:
        """Preempt the rows that came last until the caches fit their budget."""
        while not self._caches.resize(rows := list(self), self._slots.num_spanned):
            last = max(rows, key=lambda row: row.id)
            last.counters.preemptions += 1
            self._prefix.save_before_leaving(last)
            self._send_back(last)

    def to_run(self) -> list[Sequence]:
        """All rows in the order of their slots; after a failed step one suspect alone, while the others wait.

        A decode step clears a suspect. A prefill step does not: the prompt may be fine and the answer not.
        """
        rows = list(self)
        suspects = [row for row in rows if row.failures]
        return [min(suspects, key=lambda row: row.id)] if suspects else rows

    def send_all_back(self) -> None:
        """The caches are lost. All rows wait again, the oldest first."""
        for sequence in sorted(self, key=lambda row: row.id, reverse=True):
            self._send_back(sequence)
        self._caches.clear()

    def _send_back(self, sequence: Sequence) -> None:
        """Out of its slot and to the front of the queue, with all its tokens."""
        self._leave(sequence)
        sequence.drop_cache()
        self._waiting.add_returning(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It has ended, while it waited or in its row."""
        if sequence.slot is not None:
            self._leave(sequence)
        else:
            self._waiting.remove(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._slots.leave(sequence)
        self._caches.leave(sequence)
        self._prefix.leave(sequence)
        self._prefill_queue.remove(sequence)

    def check_integrity(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        rows = list(self)
        for row in rows:
            num_cells = len(row.tokens) - 1 - row.num_skipped
            if row.is_decoding and row.num_cached != num_cells:
                raise AssertionError(f"row {row.id} has {row.num_cached} cells for {num_cells} tokens")
            if row.is_decoding == (row in self._prefill_queue):
                raise AssertionError(f"row {row.id} is both or neither of prefilling and decoding")
        self._caches.check_integrity(rows)
        if len({row.slot for row in rows}) != len(rows) or any(row in rows for row in self._waiting):
            raise AssertionError("a sequence is in two places")
        if any(row not in rows for row in self._prefill_queue):
            raise AssertionError("a prefilling sequence has no slot")
        if any(row.slot is not None or row.num_cached for row in self._waiting):
            raise AssertionError("a waiting sequence holds cells")
        if len(rows) > self.max_rows:
            raise AssertionError(f"{len(rows)} rows where {self.max_rows} are allowed")
        if self._caches.num_bytes > self._caches.budget_bytes and len(rows) > 1:
            raise AssertionError("the caches are larger than their budget")
