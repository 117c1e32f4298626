"""Rows of a plan, written by hand."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.plan import RowPlan
from outrider.request import SamplingParams


def plan_row(
    prompt: Sequence[int],
    answer: Sequence[int] = (),
    drafts: Sequence[int] = (),
    *,
    params: SamplingParams,
    slot: int = 0,
    start: int | None = None,
    feeds_head: bool = False,
    num_drafts_next: int = 0,
    banned_ids: Sequence[int] = (),
    next_id: int | None = None,
) -> RowPlan:
    """A row with these committed tokens; it feeds those from `start` on, by default the last, and drafts."""
    history = [*prompt, *answer]
    start = len(history) - 1 if start is None else start
    return RowPlan(
        sequence_id=slot,
        slot=slot,
        start=start,
        token_ids=[*history[start:], *drafts],
        num_drafts=len(drafts),
        next_id=next_id,
        feeds_head=feeds_head,
        num_drafts_next=num_drafts_next,
        params=params,
        history=history,
        num_prompt=len(prompt),
        banned_ids=banned_ids,
    )
