"""A row's part in a step: of one that decodes, reads its prompt, or follows a step that nobody has read."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from outrider.engine.sequence import Sequence
from outrider.plan import UNREAD, RowPlan


def decode_row(sequence: Sequence, drafts: Tokens[int]) -> RowPlan:
    """Its last token and what is drafted after it."""
    return _row(sequence, [sequence.tokens[-1], *drafts], len(drafts), None)


def prefill_row(sequence: Sequence, size: int) -> RowPlan:
    """The next `size` tokens of its prompt."""
    start, end = sequence.num_cached, sequence.num_cached + size
    next_id = sequence.tokens[end] if end < sequence.num_prefill else None
    return _row(sequence, sequence.tokens[start:end], 0, next_id)


def overlapped_row(sequence: Sequence, last: RowPlan, num_drafts: int, num_next: int) -> RowPlan:
    """The step after `last`, whose tokens nobody has read: where it starts is a bound."""
    most_cells = sequence.num_cached + last.num_fed
    defers_head = sequence.may_pause_head and num_next == 0
    return RowPlan(
        sequence_id=sequence.id,
        slot=last.slot,
        start=most_cells,
        token_ids=(UNREAD,) * (1 + num_drafts),
        num_drafts=num_drafts,
        next_id=None,
        feeds_head=sequence.feeds_head and not defers_head,
        num_drafts_next=num_next,
        params=sequence.params,
        history=sequence.tokens,
        num_prompt=sequence.num_prompt,
        head_start=most_cells if sequence.feeds_head else None,
        defers_head=defers_head,
        position_delta=last.position_delta,
    )


def _row(sequence: Sequence, token_ids: Tokens[int], num_drafts: int, next_id: int | None) -> RowPlan:
    assert sequence.slot is not None
    picks = next_id is None
    media = sequence.request.media
    most_next = min(sequence.num_next, sequence.num_left - 2) if picks else 0
    defers_head = sequence.may_pause_head and sequence.is_decoding and most_next <= 0
    return RowPlan(
        sequence_id=sequence.id,
        slot=sequence.slot,
        start=sequence.num_cached,
        token_ids=token_ids,
        num_drafts=num_drafts,
        next_id=next_id,
        feeds_head=sequence.feeds_head and not defers_head,
        num_drafts_next=max(0, most_next),
        head_start=sequence.num_head_cached if sequence.feeds_head else None,
        defers_head=defers_head,
        params=sequence.params,
        history=sequence.tokens,
        num_prompt=sequence.num_prompt,
        banned_ids=tuple(sequence.stop_ids) if sequence.params.min_tokens else (),
        masks=sequence.masks[: num_drafts + 1] if picks and sequence.masks is not None else None,
        media=None if sequence.is_decoding else media,
        position_delta=0 if media is None else media.delta,
    )
