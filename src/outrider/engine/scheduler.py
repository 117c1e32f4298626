"""The scheduler: decides what each step does. Pure Python, no model, no clock of its own.

    waiting (first come, first served) -> prefilling (take turns) -> decoding (every step) -> finished
                 ^------------------ preempted: cells dropped, tokens kept ------------------'

`plan` and `commit` (or `fail`) alternate; between the two, `plan_overlapped` may give the next
step before the first is read. All decisions live here: who joins, who leaves,
how many cells, how many drafts.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace

from outrider.config import CacheGeometry, EngineConfig
from outrider.engine.cache_budget import CacheBudget
from outrider.engine.draft_planner import observe_drafts, pass_shape, settle_drafts, step_shape
from outrider.engine.image_encoding import ImageEmbeddings
from outrider.engine.overlap import has_own_say, settle_overlapped
from outrider.engine.prefill_queue import DEFAULT_CHUNK, PrefillQueue
from outrider.engine.prefix.cache import PrefixCache
from outrider.engine.row_plans import decode_row, overlapped_row
from outrider.engine.sequence import Delta, FinishReason, Sequence
from outrider.engine.slots import SlotTable
from outrider.plan import PassShape, PrefixCopies, RowPlan, RowResult, StepPlan, StepResult
from outrider.prompt_media import MediaPiece
from outrider.request import MAX_DEPTH
from outrider.speculate.controller import DepthController
from outrider.speculate.costs import StepShape

log = logging.getLogger(__name__)

DISK_WAIT_S = 0.005
MAX_FAILURES = 2  # a step that raises makes its rows suspects; one that raises again, alone, is given up


@dataclass
class _Planned:
    """A step under way."""

    rows: dict[int, tuple[Sequence, RowPlan]] = field(default_factory=dict)
    is_decode: bool = False  # one batch, whose rows all decode
    timed: StepShape | None = None  # what its time will tell about


class Scheduler:
    def __init__(
        self,
        config: EngineConfig,
        geometry: CacheGeometry,
        budget_bytes: int,
        controller: DepthController | None = None,
        prefix_cache: PrefixCache | None = None,
        image_embeddings: ImageEmbeddings | None = None,
    ) -> None:
        """`image_embeddings`: where the encoded pieces of pictures lie, for models that see."""
        self._controller = controller or DepthController()
        self._config = config
        self._prefix = prefix_cache
        self._budget = CacheBudget(geometry, budget_bytes, self._controller.shapes)
        self._waiting: deque[Sequence] = deque()
        self._prefill_queue = PrefillQueue(
            config.prefill_step_size or DEFAULT_CHUNK, prefix_cache, image_embeddings
        )
        self._slots = SlotTable()
        self._planned: deque[_Planned] = deque()  # at most two

    @property
    def is_idle(self) -> bool:
        return not self._waiting and len(self._slots) == 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_rows(self) -> int:
        return len(self._slots)

    @property
    def num_decoding(self) -> int:
        return len(self._slots) - len(self._prefill_queue)

    @property
    def num_bytes(self) -> int:
        """Bytes that the caches hold, by the last plan."""
        return self._budget.num_bytes

    @property
    def prefix_bytes(self) -> int:
        """Bytes of cached prefixes, by the last plan."""
        return 0 if self._prefix is None else self._prefix.index.num_bytes

    def clear_prefix_cache(self) -> None:
        if self._prefix is not None:
            self._prefix.clear()

    def wait_for_disk(self) -> None:
        """There was nothing to plan, since all rows wait for blocks on disk: give those a moment."""
        if self._prefix is not None and self._prefix.disk is not None:
            self._prefix.disk.wait(DISK_WAIT_S)

    def longest_context(self) -> int:
        """Tokens that a row alone can hold within the budget."""
        return self._budget.longest_context()

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> Delta:
        if self._prefix is not None:
            self._prefix.keep(sequence, to_the_end=True)
        return self._finish(sequence, "cancelled")

    # -- a step: plan, then commit (or fail) -------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do, or all rows wait for pictures or the disk."""
        if self._planned:
            raise RuntimeError("a step is under way: commit it, or let it fail, before the next plan")
        self._admit()
        shape_before = self._budget.shape
        self._make_room()
        moves = self._slots.settle()
        rows = self._rows_to_run()
        ready = self._prefill_queue.ready(rows)
        decoding, joining = [row for row in rows if row.is_decoding], self._prefill_queue.about_to_pick(rows)
        settle_drafts(self._controller, decoding, joining, self._budget.num_slots)
        decode, prefill = self._decode_batch(decoding), self._prefill_queue.batch(ready)
        batches = tuple(tuple(batch) for batch in (decode, prefill) if batch)
        copies = self._prefix.take_copies() if self._prefix is not None else PrefixCopies()
        is_rearranged = bool(moves) or shape_before != self._budget.shape
        if not (batches or copies or (is_rearranged and rows)):
            return None
        shape = pass_shape(self._controller, decode, self._budget.num_slots)
        did_more = bool(prefill or copies) or is_rearranged
        timed = None if did_more else step_shape(decode, shape)
        self._remember([*decode, *prefill], bool(decode and not prefill), timed)
        shapes = ((shape,) if decode else ()) + ((self._prefill_shape(prefill),) if prefill else ())
        return StepPlan(*self._budget.shape, tuple(moves), batches, shapes, copies)

    def plan_overlapped(self) -> StepPlan | None:
        """A step that follows the one under way; None where that has to be read first.

        Its rows are the same, each with the drafts that the head is making for it now. What else a step may
        do (rows that join, moves, copies, larger caches) has to wait for the next plan: with nothing of the
        kind at hand, nobody waits.
        """
        if len(self._planned) != 1 or not self._may_overlap(self._planned[0]):
            return None
        rows = list(self._planned[0].rows.values())
        if not self._budget.may_overlap(max(sequence.num_cached + row.num_fed for sequence, row in rows)):
            return None
        depths = settle_overlapped(self._controller, rows, self._budget.num_slots)
        if depths is None:
            return None
        most = [MAX_DEPTH if self._prefix is None else self._prefix.most_drafts(*row) for row in rows]
        batch = tuple(
            overlapped_row(sequence, row, min(num, limit), wanted)
            for (sequence, row), (num, wanted), limit in zip(rows, depths, most, strict=True)
        )
        shape = pass_shape(self._controller, batch, self._budget.num_slots)
        self._remember(batch, True, step_shape(batch, shape))
        return StepPlan(*self._budget.shape, (), (batch,), (shape,), is_overlapped=True)

    def _may_overlap(self, last: _Planned) -> bool:
        """Whether the same rows go on as they are, as far as can be told before the step is read."""
        if not last.is_decode or self._prefill_queue:
            return False
        if self._may_admit():
            return False
        if len(last.rows) < len(self._slots) or (self._prefix is not None and self._prefix.has_copies):
            return False
        return not any(
            sequence.slot is None  # cancelled
            or sequence.failures
            or sequence.num_left <= 1  # it will be finished
            or has_own_say(sequence)
            or (self._prefix is not None and self._prefix.may_end_block(sequence, row.num_fed))
            for sequence, row in last.rows.values()
        )

    def _remember(self, batch: Rows[RowPlan], is_decode: bool, timed: StepShape | None) -> None:
        sequences = {sequence.id: sequence for sequence in self._slots.sequences()}
        rows = {row.sequence_id: (sequences[row.sequence_id], row) for row in batch}
        self._planned.append(_Planned(rows, is_decode, timed))

    def commit(
        self, result: StepResult, seconds: float | None = None, host_s: float | None = None
    ) -> list[Delta]:
        """Take what the oldest step under way brought; what each request gained.

        `seconds` is how long it took, `host_s` how much of that passed before it was launched.
        """
        step = self._planned[0]
        brought = sorted(row.sequence_id for row in result.rows)
        if brought != sorted(step.rows):
            raise RuntimeError(f"the step was to run the rows {sorted(step.rows)} and brought {brought}")
        self._planned.popleft()
        if seconds is not None and step.timed is not None:
            self._controller.costs.observe(step.timed, seconds, host_s)
        deltas = []
        for row in result.rows:
            sequence, planned = step.rows[row.sequence_id]
            if sequence.slot is None:
                continue  # cancelled, or finished by the step before, while this one ran
            delta = self._commit_or_end(sequence, planned, row)
            if delta is not None:
                deltas.append(delta)
        return deltas

    def fail(self, error: str) -> list[Delta]:
        """The step raised and the caches are gone: nobody loses a token; who keeps failing is given up."""
        if self._prefix is not None:
            self._prefix.clear()  # it may hold copies of cells that made the step fail
        for sequence in {s.id: s for step in self._planned for s, _ in step.rows.values()}.values():
            sequence.failures += 1
        self._planned.clear()
        for sequence in sorted(self._slots.sequences(), key=lambda s: s.id, reverse=True):
            self._send_back(sequence)
        self._budget.clear()
        lost = [sequence for sequence in self._waiting if sequence.failures >= MAX_FAILURES]
        return [self._finish(sequence, "error", error) for sequence in lost]

    # -- pictures ----------------------------------------------------------------------------------------

    def next_piece(self) -> MediaPiece | None:
        """What is to be encoded next."""
        return self._prefill_queue.next_piece()

    def fail_piece(self, piece: MediaPiece, error: str) -> list[Delta]:
        """A piece that cannot be encoded ends those who wait for it; nobody else loses anything."""
        return [self._finish(row, "error", error) for row in self._prefill_queue.waiting_for(piece)]

    # -- who is in ---------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._may_admit():
            sequence = self._waiting.popleft()
            self._slots.join(sequence)
            self._prefill_queue.begin(sequence)
            if sequence.started_s is None:
                sequence.started_s = time.perf_counter()

    def _may_admit(self) -> bool:
        if not self._waiting or len(self._slots) >= self._config.max_rows:
            return False
        return self._budget.may_join(self._waiting[0], list(self._slots.sequences()))

    def _make_room(self) -> None:
        """The last to come give way until the caches fit their budget."""
        while not self._budget.make(rows := list(self._slots.sequences()), self._slots.num_spanned):
            last = max(rows, key=lambda row: row.id)
            last.preemptions += 1
            if self._prefix is not None:
                self._prefix.keep(last, to_the_end=True)
            self._send_back(last)

    def _send_back(self, sequence: Sequence) -> None:
        """Out of its slot, to the front of the queue, with all its tokens."""
        self._leave(sequence)
        sequence.drop_cache()
        self._waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._slots.leave(sequence)
        if self._prefix is not None:
            self._prefix.leave(sequence)
        self._prefill_queue.end(sequence)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> Delta:
        if sequence.slot is not None:
            self._leave(sequence)
        else:
            self._waiting.remove(sequence)
        return Delta(sequence.request.id, finish_reason=reason, error=error, stats=sequence.stats())

    # -- what the rows do --------------------------------------------------------------------------------

    def _rows_to_run(self) -> list[Sequence]:
        """All rows, in the order of their slots; after a failed step one suspect at a time, the others hold.

        A suspect is cleared by a decode step: its prompt's chunks may be fine where its answer is not.
        """
        rows = list(self._slots.sequences())
        suspects = [row for row in rows if row.failures]
        return [min(suspects, key=lambda row: row.id)] if suspects else rows

    def _prefill_shape(self, batch: Rows[RowPlan]) -> PassShape:
        return PassShape(width=self._controller.shapes.prompt_width(max(row.num_fed for row in batch)))

    def _decode_batch(self, decoding: list[Sequence]) -> list[RowPlan]:
        return [self._decode_row(row) for row in decoding]

    def _decode_row(self, sequence: Sequence) -> RowPlan:
        drafts = sequence.drafts
        if self._prefix is not None:
            drafts = drafts[: self._prefix.most_drafts(sequence)]
        return decode_row(sequence, drafts)

    def _commit_or_end(self, sequence: Sequence, planned: RowPlan, row: RowResult) -> Delta | None:
        try:
            return self._commit_row(sequence, planned, row)
        except Exception as error:  # in its own text or drafter: the other rows' step stands
            log.exception("request %s ends: its tokens could not be taken", sequence.request.id)
            return self._finish(sequence, "error", f"{type(error).__name__}: {error}")

    def _commit_row(self, sequence: Sequence, planned: RowPlan, row: RowResult) -> Delta | None:
        if sequence.is_decoding:
            sequence.failures = 0
        sequence.num_cached += planned.num_fed - planned.num_drafts + row.num_accepted
        if planned.feeds_head:
            sequence.num_head_cached = sequence.num_cached
        if not planned.picks:
            self._prefill_queue.pass_turn(sequence)
            self._keep(sequence)
            return None
        has_just_prefilled = sequence in self._prefill_queue
        self._prefill_queue.end(sequence)
        if sequence.first_token_s is None:
            sequence.first_token_s = time.perf_counter()
        sequence.steps += 1
        delta = sequence.commit(row.token_ids)
        num_taken = len(delta.token_ids)
        observe_drafts(sequence, row.token_ids)
        sequence.count_drafts(planned.num_drafts, min(row.num_accepted, num_taken))
        delta = replace(delta, logprobs=row.logprobs[:num_taken])
        self._keep(sequence, to_the_end=has_just_prefilled or delta.finish_reason is not None)
        if delta.finish_reason is not None:
            return delta.merged(self._finish(sequence, delta.finish_reason))
        sequence.prepare_next(row.drafts)
        return delta

    def _keep(self, sequence: Sequence, to_the_end: bool = False) -> None:
        if self._prefix is not None:
            self._prefix.keep(sequence, to_the_end=to_the_end)
            self._prefix.keep_state(sequence)

    # -- self-check --------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise if the books do not balance. Cheap enough for every step of a test and every idle moment."""
        rows = list(self._slots.sequences())
        if self._prefix is not None:
            self._prefix.index.check_integrity()
        for row in rows:
            if row.is_decoding and row.num_cached != len(row.tokens) - 1:
                raise AssertionError(f"row {row.id} has {row.num_cached} cells for {len(row.tokens)} tokens")
            if row.is_decoding == (row in self._prefill_queue):
                raise AssertionError(f"row {row.id} is both or neither of prefilling and decoding")
            if row.num_cached > self._budget.capacity:
                raise AssertionError(f"row {row.id} has more cells than the buffers")
        if len({row.slot for row in rows}) != len(rows) or any(row in rows for row in self._waiting):
            raise AssertionError("a sequence stands in two places")
        if any(row not in rows for row in self._prefill_queue):
            raise AssertionError("a prefilling sequence has no slot")
        if any(row.slot is not None or row.num_cached for row in self._waiting):
            raise AssertionError("a waiting sequence holds cells")
        if len(rows) > self._config.max_rows:
            raise AssertionError(f"{len(rows)} rows where {self._config.max_rows} are allowed")
        if self.num_bytes > self._budget.budget_bytes and len(rows) > 1:
            raise AssertionError("the caches are larger than their budget")
