"""Scripted acceptance: a draft is right or wrong by its row and position, whatever the model computes.

A model with random weights accepts no drafts, and in bfloat16 a token depends on the shape of its pass. So
the number of accepted drafts comes from a hash. The device computes it in the step, and the host computes it
for the depth controller. The tokens are the model's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx

from outrider.engine.draft_planner import DraftPlanner
from outrider.engine.sequence import Sequence as Row
from outrider.step import verify

ROW_STEP, POSITION_STEP = 0x85EBCA77, 0x9E3779B1  # odd constants of xxHash
MIXES = ((16, 0x7FEB352D), (15, 0x846CA68B))  # shifts and factors of the hash function lowbias32
MASK = 0xFFFFFFFF


class AcceptanceScript:
    """A draft is right with probability `share`, independently for each (row, position)."""

    def __init__(self, share: float, seed: int = 0) -> None:
        self._limit = min(MASK, int(share * 2**32))
        self._seed = seed * 0x27D4EB2F & MASK

    def is_right(self, row: int, position: int) -> bool:
        x = (self._seed + row * ROW_STEP + position * POSITION_STEP) & MASK
        for shift, factor in MIXES:
            x = ((x ^ (x >> shift)) * factor) & MASK
        return x ^ (x >> 16) < self._limit

    def count_accepted(
        self, targets: mx.array, drafts: mx.array, num_drafts: mx.array, positions: mx.array
    ) -> mx.array:
        """Replaces the function in step.verify. The row is the index in the batch."""
        if drafts.shape[1] == 0:
            return mx.zeros(num_drafts.shape, mx.int32)
        rows = mx.arange(positions.shape[0]).astype(mx.uint32)[:, None]
        step, factor = mx.array(ROW_STEP, mx.uint32), mx.array(POSITION_STEP, mx.uint32)
        x = mx.array(self._seed, mx.uint32) + rows * step + positions.astype(mx.uint32) * factor
        for shift, by in MIXES:
            x = (x ^ mx.right_shift(x, mx.array(shift, mx.uint32))) * mx.array(by, mx.uint32)
        x = x ^ mx.right_shift(x, mx.array(16, mx.uint32))
        is_draft = mx.arange(positions.shape[1]) < num_drafts[:, None]
        is_right = (x < mx.array(self._limit, mx.uint32)) & is_draft
        return mx.cumprod(is_right.astype(mx.int32), axis=1).sum(axis=1)

    def observe(self, _: DraftPlanner, row: Row, committed: Sequence[int]) -> None:
        """In the place of the draft planner's: the controller learns what the script says."""
        if row.drafting.acceptance is None or row.slot is None:
            return
        first = len(row.tokens) - len(committed)
        for proposal in row.drafting.proposals:
            places = range(len(proposal.token_ids))
            wrong = (i for i in places if not self.is_right(row.slot, first + i))
            num_right = next(wrong, len(places))
            row.drafting.acceptance.add(proposal.source, len(places), num_right, len(committed))


@contextmanager
def scripted(script: AcceptanceScript) -> Iterator[None]:
    """Within the block, the script decides for the step and for the controller which drafts are accepted."""
    counted, observe = verify.count_accepted, DraftPlanner.observe
    verify.count_accepted = script.count_accepted
    DraftPlanner.observe = lambda *args: script.observe(*args)  # type: ignore[method-assign]
    try:
        yield
    finally:
        verify.count_accepted = counted
        DraftPlanner.observe = observe  # type: ignore[method-assign]
