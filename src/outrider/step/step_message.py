"""A StepPlan as whole numbers, for the ranks that follow: only what their passes need.

The followers sample nothing. So a message has no sampling parameters, masks or histories: a decode step of a
few rows is about a hundred numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from outrider.plan import (
    BlockPiece,
    LoadCells,
    Move,
    PassShape,
    PrefixCopies,
    RowPlan,
    SaveCells,
    SaveState,
    StepPlan,
)
from outrider.request import SamplingParams

VERSION = 1  # of the message: ranks with another one are refused when they start
STEP, RESET, CLEAR_PREFIXES, STOP = 1, 2, 3, 4  # the first number of a message
NONE = -1  # stands for None where a number is at least 0
NEUTRAL_PARAMS = SamplingParams(temperature=0)


def encode(plan: StepPlan, widths: Sequence[int]) -> np.ndarray:
    """`widths`: columns of each pass."""
    if plan.is_overlapped or plan.restores or plan.copies.arrivals:
        raise ValueError("overlapped steps and cells from disk cannot be sent to other ranks")
    numbers = [STEP, plan.num_slots, plan.capacity, plan.num_blocks]
    kept = plan.kept_blocks
    numbers += [NONE] if kept is None else [len(kept), *kept]
    numbers.append(len(plan.moves))
    for move in plan.moves:
        numbers += [move.source, move.target, move.one_way]
    numbers += _encoded_copies(plan.copies)
    numbers.append(len(plan.batches))
    for width, batch in zip(widths, plan.batches, strict=True):
        numbers += [width, len(batch)]
        for row in batch:
            numbers += [row.slot, row.start, row.num_drafts, row.position_delta, int(row.is_sampling)]
            numbers += [len(row.token_ids), *row.token_ids, len(row.blocks), *row.blocks]
    return np.array(numbers, np.int32)


def _encoded_copies(copies: PrefixCopies) -> list[int]:
    numbers = [len(copies.drops), *copies.drops, len(copies.saves)]
    for save in copies.saves:
        row_block = NONE if save.row_block is None else save.row_block
        numbers += [save.block_id, save.slot, save.start, save.end, row_block]
    numbers.append(len(copies.states))
    for state in copies.states:
        numbers += [state.state_id, state.slot]
    numbers.append(len(copies.loads))
    for load in copies.loads:
        numbers += [load.slot, load.start, NONE if load.state_id is None else load.state_id]
        numbers += [len(load.row_blocks), *load.row_blocks, len(load.pieces)]
        for piece in load.pieces:
            numbers += [piece.block_id, piece.first, piece.last]
    return numbers


def decode(message: np.ndarray) -> StepPlan:
    """The plan, with shapes that give every pass its width."""
    numbers = iter(message.tolist())
    if next(numbers) != STEP:
        raise ValueError("not the message of a step")
    num_slots, capacity, num_blocks = _take(numbers, 3)
    num_kept = next(numbers)
    kept = None if num_kept == NONE else _take(numbers, num_kept)
    moves = tuple(_move(numbers) for _ in range(next(numbers)))
    copies = _copies(numbers)
    shapes, batches = [], []
    for _ in range(next(numbers)):
        shapes.append(PassShape(width=next(numbers)))
        batches.append(tuple(_row(numbers) for _ in range(next(numbers))))
    return StepPlan(
        num_slots, capacity, moves, tuple(batches), tuple(shapes), copies,
        num_blocks=num_blocks, kept_blocks=kept,
    )  # fmt: skip


def _take(numbers: Iterator[int], num: int) -> tuple[int, ...]:
    return tuple(next(numbers) for _ in range(num))


def _list(numbers: Iterator[int]) -> tuple[int, ...]:
    return _take(numbers, next(numbers))


def _optional(number: int) -> int | None:
    return None if number == NONE else number


def _move(numbers: Iterator[int]) -> Move:
    source, target, one_way = _take(numbers, 3)
    return Move(source, target, bool(one_way))


def _copies(numbers: Iterator[int]) -> PrefixCopies:
    drops = _list(numbers)
    saves = []
    for _ in range(next(numbers)):
        block_id, slot, start, end, row_block = _take(numbers, 5)
        saves.append(SaveCells(block_id, slot, start, end, row_block=_optional(row_block)))
    states = [SaveState(next(numbers), next(numbers)) for _ in range(next(numbers))]
    loads = []
    for _ in range(next(numbers)):
        slot, start, state_id = _take(numbers, 3)
        row_blocks = _list(numbers)
        pieces = tuple(BlockPiece(*_take(numbers, 3)) for _ in range(next(numbers)))
        loads.append(LoadCells(slot, start, pieces, _optional(state_id), row_blocks))
    return PrefixCopies(drops, tuple(saves), tuple(states), (), tuple(loads))


def _row(numbers: Iterator[int]) -> RowPlan:
    slot, start, num_drafts, position_delta, is_sampling = _take(numbers, 5)
    token_ids, blocks = _list(numbers), _list(numbers)
    return RowPlan(
        sequence_id=slot,
        slot=slot,
        start=start,
        token_ids=token_ids,
        num_drafts=num_drafts,
        next_id=None if is_sampling else 0,
        feeds_head=False,
        num_drafts_next=0,
        params=NEUTRAL_PARAMS,
        history=(),
        num_prompt=0,
        position_delta=position_delta,
        blocks=blocks,
    )
