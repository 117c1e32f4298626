"""The scheduler: decides what each step does. Pure Python, no model.

    waiting (waiting_queue.py) -> prefilling (take turns) -> decoding (every step) -> finished
             ^------------------ preempted: cells dropped, tokens stay --------------'

`plan` gives a step when none is in flight, `plan_overlapped` one more behind it. `commit` takes the oldest
step; `fail` drops all. Every decision is made here or in a part of the scheduler: which rows start, which are
preempted (running_rows.py), how many cells the caches have (row_caches.py), which prompt chunks run
(prefill_queue.py), which drafts are fed (draft_planner.py), what the prefix cache copies (prefix/).
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np

from outrider.config import EngineConfig
from outrider.engine.block_caches import BlockCaches
from outrider.engine.draft_planner import DraftPlanner, decode_row, may_wake, needs_host
from outrider.engine.draft_state import DraftState
from outrider.engine.in_flight import InFlightStep
from outrider.engine.memory_plan import default_max_rows
from outrider.engine.prefill_queue import PrefillQueue
from outrider.engine.prefix.cache import PrefixCache
from outrider.engine.prefix.no_cache import NoPrefixCache
from outrider.engine.prompt_pacing import PromptPacing, PromptWork
from outrider.engine.row_caches import SlotCaches
from outrider.engine.running_rows import RunningRows
from outrider.engine.sequence import Delta, FinishReason, Sequence, token_origins
from outrider.plan import (
    CacheGeometry,
    ImageEmbeddings,
    Move,
    PassShape,
    RowPlan,
    RowResult,
    ScoringPiece,
    StepPlan,
)
from outrider.prompt_media import MediaPiece
from outrider.request import InvalidRequest
from outrider.speculate.controller import DepthController
from outrider.speculate.prompt_selection import kept_positions

log = logging.getLogger(__name__)

DISK_WAIT_S = 0.005  # seconds that the engine sleeps when all rows wait for blocks on disk; chosen by hand
DEFAULT_CHUNK = 512  # prompt tokens in a step if neither the costs nor the operator tell; chosen by hand
MAX_FAILURES = 2  # failed steps after which a row ends with an error; the second one was the row alone


class Scheduler:
    def __init__(
        self,
        config: EngineConfig,
        geometry: CacheGeometry,
        budget_bytes: int,
        controller: DepthController | None = None,
        prefix_cache: PrefixCache | NoPrefixCache | None = None,
        image_embeddings: ImageEmbeddings | None = None,
        step_bytes: float = math.inf,
    ) -> None:
        """`image_embeddings`: the encoded pieces of images, for models that read images.

        `step_bytes`: memory that the arrays of a step may take.
        """
        self._controller = controller or DepthController()
        self._prefix = prefix_cache or NoPrefixCache()
        self._budget: SlotCaches | BlockCaches
        if geometry.has_blocks:
            self._budget = BlockCaches(geometry, budget_bytes, self._controller.shapes)
        else:
            self._budget = SlotCaches(geometry, budget_bytes, self._controller.shapes)
        self._prefix.use_blocks(self._budget.pool, geometry.block_size)
        self._state_bytes = geometry.bytes_per_slot
        self._step_bytes = step_bytes
        self.max_rows = config.max_rows or default_max_rows(geometry, budget_bytes)
        prompt_costs = self._controller.prompt_costs
        self._prefill_queue = PrefillQueue(prompt_costs, self._prefix, image_embeddings)
        self._pacing = PromptPacing(
            prompt_costs, config.prefill_step_size, DEFAULT_CHUNK, config.max_stall_ms / 1000, step_bytes
        )
        self._draft_planner = DraftPlanner(self._controller)
        moves_cells = not geometry.has_blocks or geometry.bytes_per_slot > 0
        self._running = RunningRows(
            self._budget, self.max_rows, self._prefix, self._prefill_queue, moves_cells
        )
        self.in_flight: deque[InFlightStep] = deque()  # planned and not committed: at most two

    @property
    def is_idle(self) -> bool:
        return not self._running.waiting and len(self._running) == 0

    @property
    def num_waiting(self) -> int:
        return len(self._running.waiting)

    @property
    def num_rows(self) -> int:
        return len(self._running)

    @property
    def num_decoding(self) -> int:
        return len(self._running) - len(self._prefill_queue)

    @property
    def num_bytes(self) -> int:
        """Bytes that the row caches hold, by the last plan."""
        return self._budget.num_bytes

    @property
    def prefix_bytes(self) -> int:
        """Bytes of cached prefixes, by the last plan."""
        return self._prefix.num_bytes

    def clear_prefix_cache(self) -> None:
        self._prefix.clear()

    def wait_for_disk(self) -> None:
        """Sleep a moment, after `plan` gave nothing because all rows wait for blocks on disk."""
        self._prefix.wait_for_disk(DISK_WAIT_S)

    def longest_context(self) -> int:
        """Tokens that one row alone can hold within the budget."""
        return self._budget.longest_context()

    def add(self, sequence: Sequence) -> None:
        self._running.waiting.add(sequence)

    def cancel(self, sequence: Sequence) -> Delta:
        self._prefix.save_before_leaving(sequence)
        return self._finish(sequence, "cancelled")

    # -- a step: plan, then commit (or fail) -------------------------------------------------------------

    def plan(self) -> InFlightStep | None:
        """The next step; None if there is nothing to do, or all rows wait for images or the disk."""
        if self.in_flight:
            raise RuntimeError("a step is in flight: commit it, or let it fail, before the next plan")
        restores = self._running.take_restores()
        arrangement = self._running.arrange()
        rows = self._running.to_run()
        ready = self._prefill_queue.ready(rows)
        decoding = [row for row in rows if row.is_decoding]
        if not self._pacing.may_prefill(len(decoding)):
            ready = []
        decode = self._decode_batch(decoding, rows if self._controller.looks_ahead else ready)
        decode_shape = self._draft_planner.pass_shape(decode, self._budget.num_slots)
        prefill: list[RowPlan] = []
        if ready:
            decode_s = self._draft_planner.expected_s(decode, decode_shape) if decode else 0.0
            chunks, prompt_shape = self._prefill_queue.batch(ready, self._pacing.limit(decode_s))
            prefill = self._placed(chunks)
        copies = self._prefix.take_copies()
        is_rearranged = arrangement.changes(self._budget.shape)
        if not (decode or prefill or copies or restores or (is_rearranged and rows)):
            return None
        passes = [(decode, decode_shape)] if decode else []
        if prefill:
            width = self._controller.shapes.prefill_width(max(row.num_fed for row in prefill))
            passes.append((prefill, PassShape(width=width)))
        plan = self._step_plan(
            passes,
            moves=arrangement.moves,
            kept_blocks=arrangement.kept_blocks,
            copies=copies,
            restores=restores,
        )
        cost_shape, work = None, None
        if decode and not (prefill or copies or restores or is_rearranged):
            cost_shape = self._draft_planner.step_shape(decode, decode_shape)
        if prefill:
            share = self._pacing.decode_share(len(decode), len(rows) - len(decode))
            is_typical = not (is_rearranged or copies.loads or copies.arrivals)
            work = PromptWork(prompt_shape, decode_s, share, is_typical)
        is_decode_only = bool(decode) and not prefill
        return self._new_step(plan, is_decode_only=is_decode_only, cost_shape=cost_shape, prompt_work=work)

    def _decode_batch(self, decoding: list[Sequence], rows: list[Sequence]) -> list[RowPlan]:
        """The decoding rows with their drafts. `rows`: with those that prefill in this step, or soon."""
        joining = self._prefill_queue.about_to_sample(rows, self._pacing.max_tokens)
        self._draft_planner.choose_drafts(decoding, joining, self._budget.num_slots)
        return self._placed([decode_row(row, self._prefix.max_drafts(row)) for row in decoding])

    def _step_plan(
        self, passes: list[tuple[list[RowPlan], PassShape]], moves: tuple[Move, ...] = (), **others: Any
    ) -> StepPlan:
        """A plan of these passes in the caches as they are now. `others`: fields of StepPlan."""
        num_slots, capacity, num_blocks = self._budget.shape
        batches = tuple(tuple(rows) for rows, _ in passes)
        shapes = tuple(shape for _, shape in passes)
        return StepPlan(num_slots, capacity, moves, batches, shapes, num_blocks=num_blocks, **others)

    def plan_overlapped(self) -> InFlightStep | None:
        """The step after the one in flight; None if that one has to be read first.

        Its rows are the same, each with the drafts that the head is making for it now. Rows that start,
        moves, copies and larger caches have to wait for the next `plan`, so there is no overlapped step if
        any of these is due.
        """
        if len(self.in_flight) != 1 or not self._may_overlap(self.in_flight[0]):
            return None
        rows = list(self.in_flight[0].rows.values())
        if not self._budget.may_overlap(rows):
            return None
        max_drafts = [self._prefix.max_drafts(*row) for row in rows]
        batch = self._draft_planner.plan_overlapped(rows, max_drafts, self._budget.num_slots)
        if batch is None:
            return None
        shape = self._draft_planner.pass_shape(batch, self._budget.num_slots)
        batch = self._placed(batch)
        keeps_states = self._state_bytes > 0 and any(may_wake(sequence) for sequence, _ in rows)
        plan = self._step_plan([(batch, shape)], is_overlapped=True, keeps_states=keeps_states)
        cost_shape = self._draft_planner.step_shape(batch, shape)
        return self._new_step(plan, is_decode_only=True, cost_shape=cost_shape)

    def _placed(self, batch: list[RowPlan]) -> list[RowPlan]:
        return self._budget.placed(batch, list(self._running))

    def _may_overlap(self, step: InFlightStep) -> bool:
        """True if the next step has the same rows, as far as the host can know before it reads this step."""
        if not step.is_decode_only or self._running.can_start_next() or self._prefix.has_copies:
            return False
        if len(step.rows) < self.num_decoding:
            return False
        if self._prefill_queue and self._is_prompts_turn_after(step):
            return False
        # Two more versions of the recurrent states: see StepPlan.keeps_states.
        can_roll_back = 2 * self._budget.num_slots * self._state_bytes <= self._step_bytes
        return not any(
            sequence.slot is None  # cancelled or finished
            or sequence.failures
            or sequence.state_age
            or sequence.num_left <= 1  # the step in flight will finish it
            or needs_host(sequence, can_roll_back)
            or self._prefix.may_end_block(sequence, row.num_fed)
            for sequence, row in step.rows.values()
        )

    def _is_prompts_turn_after(self, step: InFlightStep) -> bool:
        expected_s = self._controller.costs.real_s(step.cost_shape) if step.cost_shape is not None else None
        return expected_s is None or self._pacing.may_prefill(self.num_decoding, expected_s)

    def _new_step(self, plan: StepPlan, **facts: Any) -> InFlightStep:
        sequences = {sequence.id: sequence for sequence in self._running}
        rows = {row.sequence_id: (sequences[row.sequence_id], row) for batch in plan.batches for row in batch}
        step = InFlightStep(plan, rows, **facts)
        self.in_flight.append(step)
        return step

    def commit(self, step: InFlightStep) -> list[Delta]:
        """Take the result of the oldest step in flight; return what each request gained."""
        if step is not self.in_flight[0] or step.result is None:
            raise RuntimeError("only the oldest step in flight can be committed, once it was read")
        brought = sorted(row.sequence_id for row in step.result.rows)
        if brought != sorted(step.rows):
            raise RuntimeError(f"the step was to run the rows {sorted(step.rows)} and brought {brought}")
        self.in_flight.popleft()
        if step.seconds is not None and step.is_typical and step.cost_shape is not None:
            self._controller.costs.observe(step.cost_shape, step.seconds, step.host_s)
        if step.seconds is not None:
            self._pacing.stepped(step.prompt_work, step.seconds)
        deltas = []
        for result in step.result.rows:
            sequence, planned = step.rows[result.sequence_id]
            if sequence.slot is None or sequence.state_age:
                continue  # cancelled, finished or rolled back by the step before, while this one ran
            try:
                delta = self._commit_row(sequence, planned, result)
            except InvalidRequest as error:  # its grammar cannot go on
                log.warning("request %s ends: %s", sequence.request.id, error)
                delta = replace(self._finish(sequence, "error", str(error)), is_client_error=True)
            except Exception as error:  # in its own text or drafter: the other rows are committed
                log.exception("request %s ends: its tokens could not be committed", sequence.request.id)
                delta = self._finish(sequence, "error", f"{type(error).__name__}: {error}")
            if delta is not None:
                deltas.append(delta)
        return deltas

    def _commit_row(self, sequence: Sequence, planned: RowPlan, result: RowResult) -> Delta | None:
        if sequence.is_decoding:
            sequence.failures = 0
        sequence.num_cached += planned.num_fed - planned.num_drafts + result.num_accepted
        if planned.feeds_head:
            sequence.num_head_cached = sequence.num_cached
        if result.prompt_logprobs:  # those of a part that is computed again take the place of the first ones
            sequence.prompt_logprobs[planned.start + 1 :] = result.prompt_logprobs
        if not planned.is_sampling:
            self._prefill_queue.pass_turn(sequence)
            self._prefix.save(sequence)
            return None
        has_just_prefilled = sequence in self._prefill_queue
        self._prefill_queue.remove(sequence)
        counters = sequence.counters
        if counters.first_token_s is None:
            counters.first_token_s = time.perf_counter()
        counters.steps += 1
        delta = sequence.commit(result.token_ids, has_masks=planned.masks is not None)
        num_taken = len(delta.token_ids)
        is_rolled_back = num_taken < len(result.token_ids) and delta.finish_reason is None
        if is_rolled_back:
            self._roll_back(sequence, len(result.token_ids) - num_taken, len(result.token_ids))
        if result.error is not None and delta.finish_reason is None:
            delta = replace(delta, logprobs=result.logprobs[:num_taken])
            ended = replace(self._finish(sequence, "error", result.error), is_client_error=True)
            return delta.merged(ended)
        if num_taken == 0:
            return None  # the row runs again, with the drafts that it had
        self._draft_planner.observe(sequence, result.token_ids[:num_taken])
        counters.add_drafts(planned.num_drafts, min(result.num_accepted, num_taken))
        if result.logprobs:
            delta = replace(delta, logprobs=result.logprobs[:num_taken])
        if sequence.prompt_logprobs and sequence.num_generated == num_taken:  # the first tokens of the answer
            delta = replace(delta, prompt_logprobs=tuple(sequence.prompt_logprobs))
        if sequence.params.token_origins:
            origins = token_origins(planned, len(result.token_ids))
            delta = replace(delta, origins=origins[:num_taken])
        if not sequence.state_age:
            self._prefix.save(sequence, to_end=has_just_prefilled or delta.finish_reason is not None)
        if delta.finish_reason is not None:
            return delta.merged(self._finish(sequence, delta.finish_reason))
        drafts, margins = ((), ()) if is_rolled_back else (result.drafts, result.margins)
        asks = self._asks_host_drafters(sequence.drafting)
        sequence.drafting.propose(sequence.tokens, drafts, margins, sequence.num_left, asks)
        if not sequence.is_decoding:
            sequence.drafting.drop()
        return delta

    def _asks_host_drafters(self, drafting: DraftState) -> bool:
        if not drafting.is_auto or drafting.acceptance is None:
            return True
        if drafting.drafter is not None:  # it is the row's only one, or follows a text
            return self._controller.drafts_may_pay
        return self._controller.asks_host_drafters(drafting.acceptance)

    def _roll_back(self, sequence: Sequence, num_dropped: int, num_sampled: int) -> None:
        """A grammar woke in an overlapped step: the tokens after that were sampled without its masks.

        Recurrent states cannot be cut. They become what they were before the step, and the tokens of the step
        that stand are fed again, as those of a prompt.
        """
        sequence.num_cached -= num_sampled if self._state_bytes else num_dropped
        sequence.num_head_cached = min(sequence.num_head_cached, sequence.num_cached)
        if not self._state_bytes:
            return
        sequence.state_age = 1 + len(self.in_flight)
        if sequence.num_cached < len(sequence.tokens) - 1:
            sequence.num_prefill = len(sequence.tokens)
            self._prefill_queue.add(sequence)

    def fail(self, error: str) -> list[Delta]:
        """A step raised and the caches are lost. No sequence loses a token; one that fails again ends."""
        self._prefix.clear()  # it may hold copies of the cells that made the step fail
        failed = {sequence.id: sequence for step in self.in_flight for sequence, _ in step.rows.values()}
        for sequence in failed.values():
            sequence.failures += 1
        self.in_flight.clear()
        self._running.send_all_back()
        given_up = [sequence for sequence in self._running.waiting if sequence.failures >= MAX_FAILURES]
        return [self._finish(sequence, "error", error) for sequence in given_up]

    # -- images ------------------------------------------------------------------------------------------

    def next_piece(self) -> MediaPiece | None:
        """The piece of an image that is to be encoded next."""
        return self._prefill_queue.next_piece()

    def fail_piece(self, piece: MediaPiece, error: str) -> list[Delta]:
        """A piece cannot be encoded: the requests that wait for it end with an error, the others go on."""
        return [self._finish(row, "error", error) for row in self._prefill_queue.waiting_for(piece)]

    # -- scores of prompts (spec_prefill) ----------------------------------------------------------------

    def next_to_score(self) -> ScoringPiece | None:
        """The tokens of a prompt that the scorer reads next."""
        return self._prefill_queue.next_to_score(self._pacing.max_scored_tokens)

    def scored(self, piece: ScoringPiece, scores: np.ndarray | None) -> None:
        """The scorer has read a piece. `scores`: of all tokens of the prompt, if it was the last piece."""
        row = self._prefill_queue.scored(piece)
        if row is not None and scores is not None:
            assert row.params.spec_prefill is not None
            row.keep(kept_positions(scores, row.params.spec_prefill.keep))

    def fail_scoring(self, piece: ScoringPiece, error: str) -> list[Delta]:
        """A prompt cannot be scored: its request ends with an error, the others go on."""
        row = self._prefill_queue.scored(piece)
        return [] if row is None else [self._finish(row, "error", error)]

    # -- the end of a sequence; the books ----------------------------------------------------------------

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> Delta:
        self._running.remove(sequence)
        return Delta(sequence.request.id, finish_reason=reason, error=error, stats=sequence.stats())

    def check_integrity(self) -> None:
        """Raise AssertionError if the state is inconsistent. Runs whenever the engine is idle."""
        self._prefix.check_integrity()
        self._running.check_integrity()
