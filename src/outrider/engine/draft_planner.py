"""The draft planner: which drafts each row feeds, how many the head makes next, and the rows' plans.

The depth controller decides (speculate/controller.py); this module tells it what the rows could feed, and
turns its choice into RowPlans. It also plans overlapped steps: steps whose rows continue before the host has
read the step before them. Pure Python.

"The head" is an MTP head or a draft model: a draft model is fed in the same rows (step/draft_model.py). A
device that outruns its host overlaps steps and never pauses an MTP head (build.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import replace

from outrider.engine.draft_state import DraftState
from outrider.engine.sequence import Sequence
from outrider.plan import UNREAD, PassShape, RowPlan
from outrider.request import MAX_DEPTH
from outrider.speculate.acceptance import RowAcceptance
from outrider.speculate.controller import DepthController, DraftRequest, Offer
from outrider.speculate.costs import StepShape

MAX_HEAD_LAG = 2048  # cells; after a longer pause the head no longer drafts for that row; chosen by hand
MAX_CATCH_UP = 1024  # cells that paused heads are fed in one step, so that no row waits long; chosen by hand


class DraftPlanner:
    def __init__(self, controller: DepthController) -> None:
        self._controller = controller

    # -- drafts of a step --------------------------------------------------------------------------------

    def choose_drafts(self, decoding: Rows[Sequence], joining: Rows[Sequence], num_slots: int) -> None:
        """Give every decoding row its drafts for this step, and all rows their `num_drafts_next`.

        `joining` are the rows that may sample their first token in this step, or soon: whether the head
        drafts is decided for all of them.
        """
        rows = [*decoding, *joining]
        if not any(row.drafting.max_depth > 0 for row in rows):
            return
        if self._stays_paused(rows, len(decoding)):
            for row in rows:
                row.drafting.num_drafts_next = 0
                row.drafting.use(0, 0)
            return
        requests = [self._request(row, joins=i >= len(decoding)) for i, row in enumerate(rows)]
        longest = decoding if decoding and self._controller.looks_ahead else rows  # others may join later
        choice = self._controller.choose(requests, max(len(row.tokens) for row in longest), num_slots)
        for row, (which, num), num_next in zip(rows, choice.feed, choice.num_drafts_next, strict=True):
            row.drafting.num_drafts_next = num_next
            row.drafting.use(which, num)
        self._limit_catch_up(decoding)

    def _stays_paused(self, rows: Rows[Sequence], num_decoding: int) -> bool:
        """True if no row feeds or makes drafts, for the same reasons as in the step before."""
        states = [row.drafting for row in rows]
        if any(state.max_depth > 0 and not state.is_auto for state in states):
            return False  # rows of a fixed depth draft in every step
        records = [self._record(row) for row in rows]
        offers = [
            (record, offer)
            for record, state in zip(records, states, strict=True)
            if state.proposals
            for offer in _offers(state)
        ]
        return self._controller.stays_paused(records, num_decoding, offers)

    def _request(self, row: Sequence, joins: bool) -> DraftRequest:
        offers = _offers(row.drafting)
        head_lag = 0 if joins else row.head_lag
        return self._draft_request(row, offers, head_lag, row.num_left, joins)

    def _draft_request(
        self,
        row: Sequence,
        offers: Rows[Offer],
        head_lag: int,
        num_left: int,
        joins: bool = False,
        others: Rows[Offer] = (),
    ) -> DraftRequest:
        fixed = None if row.drafting.is_auto else row.drafting.max_depth
        max_next = max_drafts_next(row, num_left, head_lag)
        return DraftRequest(self._record(row), offers, fixed, max_next, head_lag, joins, others, num_left)

    def _record(self, row: Sequence) -> RowAcceptance:
        if row.drafting.acceptance is None:
            row.drafting.acceptance = self._controller.new_record(row.params)
        return row.drafting.acceptance

    def _limit_catch_up(self, decoding: Rows[Sequence]) -> None:
        """Let only some of the paused heads catch up in this step. The other heads wait for a later step."""
        late = [row for row in decoding if row.drafting.is_auto and row.drafting.num_drafts_next]
        late = sorted((row for row in late if row.head_lag), key=lambda row: (row.head_lag, row.id))
        num_cells = 0
        for i, row in enumerate(late):
            num_cells += row.head_lag
            if i > 0 and num_cells > MAX_CATCH_UP:
                row.drafting.num_drafts_next = 0

    def observe(self, row: Sequence, committed: Rows[int]) -> None:
        """Compare all proposals for a row, fed or not, with the committed tokens."""
        if row.drafting.acceptance is None:
            return
        for proposal in row.drafting.proposals:
            row.drafting.acceptance.compare(
                proposal.source, proposal.token_ids, committed, proposal.num_sure, proposal.confidence
            )

    # -- overlapped steps --------------------------------------------------------------------------------

    def plan_overlapped(
        self, rows: Rows[tuple[Sequence, RowPlan]], max_drafts: Rows[int], num_slots: int
    ) -> list[RowPlan] | None:
        """The next rows of the unread step `rows`, each with the drafts that the head is making for it now.

        None if the host has to read that step first: a paused head has to catch up with tokens that are not
        read yet, or the drafts that n-gram lookup may find in these tokens are worth the wait.
        """
        if not any(sequence.drafting.max_depth > 0 for sequence, _ in rows):
            return [overlapped_row(sequence, row, 0, 0) for sequence, row in rows]
        requests = [self._overlapped_request(*each) for each in rows]
        has_lookup = any(sequence.drafting.lookup is not None for sequence, _ in rows)
        if has_lookup and self._controller.should_wait_for_lookup(requests):
            return None
        num_cells = max(len(sequence.tokens) + row.num_fed for sequence, row in rows)
        choice = self._controller.choose(requests, num_cells, num_slots)
        planned = []
        for (sequence, row), (_, num), num_next, limit in zip(
            rows, choice.feed, choice.num_drafts_next, max_drafts, strict=True
        ):
            num_left = sequence.num_left - 1  # the unread step commits at least one token
            num_next = min(num_next, max_drafts_next(sequence, num_left))
            if row.defers_head and num_next:
                return None
            num_drafts = max(0, min(num, row.num_drafts_next, num_left - 1, limit))
            planned.append(overlapped_row(sequence, row, num_drafts, num_next))
        return planned

    def _overlapped_request(self, sequence: Sequence, row: RowPlan) -> DraftRequest:
        offers = [Offer("head", row.num_drafts_next)] if row.num_drafts_next else []
        proposals = sequence.drafting.proposals
        others = [Offer(p.source, len(p.token_ids), p.num_sure) for p in proposals if p.source != "head"]
        head_lag = sequence.head_lag + row.num_fed if row.defers_head else 0
        return self._draft_request(sequence, offers, head_lag, sequence.num_left - 1, others=others)

    # -- shapes ------------------------------------------------------------------------------------------

    def pass_shape(self, batch: Rows[RowPlan], num_slots: int) -> PassShape:
        """The shape of the decoding rows' pass."""
        if not batch:
            return PassShape()
        width = max(row.num_fed for row in batch)
        num_cells = max(row.start for row in batch)
        shapes = self._controller.shapes
        shapes.count_step(len(batch), width)
        return PassShape(*shapes.decode_shape(len(batch), width, num_cells, num_slots))

    def step_shape(self, batch: Rows[RowPlan], shape: PassShape) -> StepShape | None:
        """The cost-table entry that a decode step's time is evidence for; None if it does other work too."""
        if not batch or any(row.head_lag for row in batch if row.feeds_head):
            return None
        return self._cost_shape(batch, shape)

    def expected_s(self, batch: Rows[RowPlan], shape: PassShape) -> float | None:
        """Seconds that the decoding rows' pass will take; None if nothing is known yet."""
        return self._controller.costs.real_s(self._cost_shape(batch, shape))

    def _cost_shape(self, batch: Rows[RowPlan], shape: PassShape) -> StepShape:
        drafting = [row for row in batch if row.feeds_head]
        num_tokens, depth = (
            sum(row.num_fed for row in batch),
            max((row.num_drafts_next for row in drafting), default=0),
        )
        width = self._controller.costs.mean_width(shape.rows, num_tokens, shape.width)
        num_cells, num_random = (
            max(row.start for row in batch),
            sum(not row.params.is_greedy for row in batch),
        )
        return StepShape(shape.rows, width, len(drafting), depth, num_cells, num_random)


def _offers(drafting: DraftState) -> list[Offer]:
    return [Offer(p.source, len(p.token_ids), p.num_sure, p.confidence) for p in drafting.proposals]


def max_drafts_next(row: Sequence, num_left: int, head_lag: int = 0) -> int:
    """Most drafts that the head may make now for the row's next step; `num_left` tokens may still come.

    This step commits at least one token, and the next step ends with a bonus token: that leaves num_left - 2.
    """
    most_cells = len(row.tokens) + 2 * (1 + MAX_DEPTH)  # after this step and one before it that is not read
    if head_lag > MAX_HEAD_LAG or row.drafting.exceeds_head_context(most_cells):
        return 0
    return max(0, min(row.drafting.head_depth, num_left - 2))


def may_wake(row: Sequence) -> bool:
    """Whether a grammar of the row may restrict one of its unread tokens."""
    grammar = row.drafting.grammar
    return grammar is not None and grammar.needs_host


def needs_host(row: Sequence, can_roll_back: bool) -> bool:
    """Whether the row's next step depends on its unread tokens in a way that only the host can compute.

    A grammar that sleeps does not, if the tokens after its start can be rolled back: see Sequence.commit.
    N-gram lookup is weighed elsewhere: DepthController.should_wait_for_lookup.
    """
    params, drafting = row.params, row.drafting
    return (
        drafting.masks is not None
        or (may_wake(row) and (not can_roll_back or drafting.head_layers > 1))
        or params.changes_logits
        or bool(params.logits_processors)
        or params.min_tokens > row.num_generated
        or (drafting.drafter is not None and any(p.source != "head" for p in drafting.proposals))
    )


# -- plans of rows -----------------------------------------------------------------------------------------


def decode_row(sequence: Sequence, max_drafts: int) -> RowPlan:
    """The last token and the chosen drafts."""
    drafts = sequence.drafting.drafts[:max_drafts]
    return _row(sequence, [sequence.tokens[-1], *drafts], len(drafts), None)


def prefill_row(sequence: Sequence, size: int) -> RowPlan:
    """The next `size` tokens of the prompt. (At skipped tokens the head is fed the next one that is read.)"""
    start, end = sequence.num_cached, sequence.num_cached + size
    positions = sequence.positions(start, min(end + 1, sequence.num_prefill))
    token_ids = [sequence.tokens[position] for position in positions]
    row = _row(sequence, token_ids[:size], 0, token_ids[size] if len(token_ids) > size else None)
    return row if sequence.kept is None else replace(row, positions=tuple(positions[:size]))


def overlapped_row(sequence: Sequence, last: RowPlan, num_drafts: int, num_next: int) -> RowPlan:
    """The step after `last`, which is not read yet: `start` is the most cells that the row can have."""
    max_cells = sequence.num_cached + last.num_fed
    drafting = sequence.drafting
    is_too_long = drafting.exceeds_head_context(max_cells + 1 + num_drafts)
    defers_head = drafting.stores_head_inputs or is_too_long or (drafting.may_pause_head and num_next == 0)
    return RowPlan(
        sequence_id=sequence.id,
        slot=last.slot,
        start=max_cells,
        token_ids=(UNREAD,) * (1 + num_drafts),
        num_drafts=num_drafts,
        next_id=None,
        feeds_head=sequence.feeds_head and not defers_head,
        num_drafts_next=num_next,
        params=sequence.params,
        history=sequence.tokens,
        num_prompt=sequence.num_prompt,
        head_start=max_cells if sequence.feeds_head else None,
        defers_head=defers_head,
        position_delta=last.position_delta,
        blocks=tuple(sequence.blocks),
        has_images=last.has_images,
        adapter=last.adapter,
    )


def _row(sequence: Sequence, token_ids: Rows[int], num_drafts: int, next_id: int | None) -> RowPlan:
    assert sequence.slot is not None
    drafting, media = sequence.drafting, sequence.request.media
    is_sampling = next_id is None
    num_next = 0
    if is_sampling and drafting.num_drafts_next:
        num_next = min(drafting.num_drafts_next, max_drafts_next(sequence, sequence.num_left))
    is_paused = drafting.may_pause_head and is_sampling and num_next == 0
    is_too_long = drafting.exceeds_head_context(sequence.num_cached + len(token_ids))
    defers_head = drafting.stores_head_inputs or is_paused or is_too_long
    return RowPlan(
        sequence_id=sequence.id,
        slot=sequence.slot,
        start=sequence.num_cached,
        token_ids=token_ids,
        num_drafts=num_drafts,
        next_id=next_id,
        feeds_head=sequence.feeds_head and not defers_head,
        num_drafts_next=num_next,
        head_start=sequence.num_head_cached if sequence.feeds_head else None,
        defers_head=defers_head,
        params=sequence.params,
        history=sequence.tokens,
        num_prompt=sequence.num_prompt,
        banned_ids=tuple(sequence.stop_ids) if sequence.params.min_tokens else (),
        masks=drafting.masks[: num_drafts + 1] if is_sampling and drafting.masks is not None else None,
        media=None if sequence.is_decoding else media,
        position_delta=sequence.num_skipped if media is None else media.delta,
        draft_source=drafting.source,
        num_forced=drafting.num_forced,
        blocks=tuple(sequence.blocks),
        has_images=media is not None,
        adapter=0 if sequence.adapter is None else sequence.adapter.id,
    )
