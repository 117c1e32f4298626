"""Rows of a step that is planned before the step in front of it is read. Pure Python.

Nobody knows yet which tokens those rows will have; but that is for the device to say, as long as nothing on
the host has a say in what comes next.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

from outrider.engine.draft_planner import draft_request
from outrider.engine.sequence import Sequence
from outrider.plan import RowPlan
from outrider.speculate.acceptance import Source
from outrider.speculate.controller import DepthController, DraftRequest


def has_own_say(row: Sequence) -> bool:
    """Whether the row's next step depends on its tokens in a way that only the host knows."""
    params = row.params
    return (
        row.grammar is not None
        or params.has_penalties
        or bool(params.logit_bias)
        or params.min_tokens > row.num_generated
        or (row.drafter is not None and any(proposal.source != "head" for proposal in row.proposals))
    )


def settle_overlapped(
    controller: DepthController, rows: Rows[tuple[Sequence, RowPlan]], num_slots: int
) -> list[tuple[int, int]] | None:
    """For each row of the step under way: how many of its drafts to feed next, and how many to make then.

    None where a head that rests is wanted again, which has to be fed tokens that nobody has read; or where
    what a lookup may find in those tokens is worth the wait.
    """
    if not any(sequence.max_depth > 0 for sequence, _ in rows):
        return [(0, 0)] * len(rows)
    requests = [_draft_request(controller, *each) for each in rows]
    if any(sequence.lookup is not None for sequence, _ in rows) and controller.would_wait(requests):
        return None
    resting = [request for request, (_, row) in zip(requests, rows, strict=True) if row.defers_head]
    if controller.is_probe_near(resting, len(rows)):
        return None
    num_cells = max(len(sequence.tokens) + row.num_fed for sequence, row in rows)
    choice = controller.choose(requests, num_cells, num_slots)
    depths = []
    for (sequence, row), (_, num), wanted in zip(rows, choice.feed, choice.next, strict=True):
        left = sequence.num_left - 1  # when the step under way brings just one token
        num_next = max(0, min(wanted, left - 2))
        if row.defers_head and num_next:
            return None
        depths.append((max(0, min(num, row.num_drafts_next, left - 1)), num_next))
    return depths


def _draft_request(controller: DepthController, sequence: Sequence, row: RowPlan) -> DraftRequest:
    offers: list[tuple[Source, int, int]] = [("head", row.num_drafts_next, 0)] if row.num_drafts_next else []
    others = [(p.source, len(p.token_ids), p.num_sure) for p in sequence.proposals if p.source != "head"]
    behind = sequence.num_cached - sequence.num_head_cached + row.num_fed if row.defers_head else 0
    return draft_request(controller, sequence, offers, behind, sequence.num_left - 1, others=others)
