"""Between scheduler and depth controller: what the rows of a step request for, and what they are given.

Owns no decision: those are the controller's. Must not know caches.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

from outrider.engine.sequence import Sequence
from outrider.plan import PassShape, RowPlan
from outrider.speculate.acceptance import Source
from outrider.speculate.controller import DepthController, DraftRequest
from outrider.speculate.costs import StepShape

MOST_BEHIND = 2048  # cells; a head that has rested for longer does not come back to a row
CATCH_UP_CELLS = 1024  # that heads are fed in one step, so that nobody waits long; always one row's


def settle_drafts(
    controller: DepthController, decoding: Rows[Sequence], joining: Rows[Sequence], num_slots: int
) -> None:
    """Give every decoding row its drafts for this step, and all rows what the head shall make for the next.

    `joining` are the rows that may pick their first token in this step.
    """
    rows = [*decoding, *joining]
    if not any(row.max_depth > 0 for row in rows):
        return
    num_cells = max(len(row.tokens) for row in rows)
    requests = [_draft_request(controller, row, joins=i >= len(decoding)) for i, row in enumerate(rows)]
    choice = controller.choose(requests, num_cells, num_slots)
    for row, (offer, num), wanted in zip(rows, choice.feed, choice.next, strict=True):
        row.num_next = wanted
        row.use_drafts(offer, num)
    _take_turns(decoding)


def _take_turns(decoding: Rows[Sequence]) -> None:
    """Of the heads that come back in this step, let only some catch up; the others rest a step longer."""
    late = [row for row in decoding if row.is_auto and row.num_next and row.num_cached > row.num_head_cached]
    late.sort(key=lambda row: (row.num_cached - row.num_head_cached, row.id))
    num_cells = 0
    for i, row in enumerate(late):
        num_cells += row.num_cached - row.num_head_cached
        if i > 0 and num_cells > CATCH_UP_CELLS:
            row.num_next = 0


def observe_drafts(row: Sequence, committed: Rows[int]) -> None:
    """Hold everything that was proposed for a row, fed or not, against the tokens that came."""
    if row.record is None:
        return
    for proposal in row.proposals:
        row.record.compare(proposal.source, proposal.token_ids, committed, proposal.num_sure)


def pass_shape(controller: DepthController, batch: Rows[RowPlan], num_slots: int) -> PassShape:
    """That of the decoding rows' pass."""
    if not batch:
        return PassShape()
    width = max(row.num_fed for row in batch)
    num_cells = max(row.start for row in batch)
    controller.shapes.note(len(batch), width)
    return PassShape(*controller.shapes.decoding(len(batch), width, num_cells, num_slots))


def step_shape(batch: Rows[RowPlan], shape: PassShape) -> StepShape | None:
    """What the time of a decode step tells about; None where it will do other work as well."""
    drafting = [row for row in batch if row.feeds_head]
    if not batch or any(row.num_behind for row in drafting):
        return None
    depth = max((row.num_drafts_next for row in drafting), default=0)
    num_cells, num_sampled = max(row.start for row in batch), sum(not row.params.is_greedy for row in batch)
    return StepShape(shape.rows, shape.width, len(drafting), depth, num_cells, num_sampled)


def draft_request(
    controller: DepthController,
    row: Sequence,
    offers: Rows[tuple[Source, int, int]],
    behind: int,
    num_left: int,
    joins: bool = False,
    others: Rows[tuple[Source, int, int]] = (),
) -> DraftRequest:
    """What a row may ask for: `behind` cells of it the head has not been fed, `num_left` tokens may come."""
    if row.record is None:
        row.record = controller.new_record(row.params)
    most_next = min(row.head_depth, num_left - 2) if behind <= MOST_BEHIND else 0
    fixed = None if row.is_auto else row.max_depth
    return DraftRequest(row.record, offers, fixed, max(0, most_next), behind, joins, others)


def _draft_request(controller: DepthController, row: Sequence, joins: bool) -> DraftRequest:
    offers = [(p.source, len(p.token_ids), p.num_sure) for p in row.proposals]
    behind = 0 if joins else row.num_cached - row.num_head_cached
    return draft_request(controller, row, offers, behind, row.num_left, joins)
