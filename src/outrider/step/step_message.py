"""A StepPlan as whole numbers, for the ranks that follow: only what their passes need.

The followers sample nothing. So a message has no sampling parameters, masks or histories: a decode step of a
few rows is about a hundred numbers. What the MTP head does with a row is sent if the head is divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.plan import (
    Arrival,
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
from outrider.step.batch import head_position_grid, position_grid

VERSION = 5  # of the message: ranks with another one are refused when they start
STEP, RESET, CLEAR_PREFIXES, STOP, READ_FILES, CLEAR_DISK = 1, 2, 3, 4, 5, 6  # a message's first number
NONE = -1  # stands for None where a number is at least 0
NO_HEAD = (0, 0, 0, 0)  # of a row: see `_encoded_head`
NEUTRAL_PARAMS = SamplingParams(temperature=0)


@dataclass(frozen=True)
class PassMedia:
    """What other ranks have to know of the images in a pass. The embeddings follow, as an array of rank 0."""

    has_images: bool
    positions: np.ndarray | None  # int32 [3, rows, width] while an image prefills that has such positions
    head_has_images: bool = False  # among the tokens that a divided head is fed
    # The same for its cells, from the first that it has missed.  int32 [3, fed rows, columns]
    head_positions: np.ndarray | None = None


@dataclass(frozen=True)
class FollowedStep:
    plan: StepPlan
    media: tuple[PassMedia, ...]  # of each pass


def encode(plan: StepPlan, widths: Sequence[int], has_divided_head: bool = False) -> np.ndarray:
    """`widths`: columns of each pass."""
    if plan.is_overlapped or plan.restores:
        raise ValueError("overlapped steps cannot be sent to other ranks")
    numbers = [STEP, plan.num_slots, plan.capacity, plan.num_blocks]
    kept = plan.kept_blocks
    numbers += [NONE] if kept is None else [len(kept), *kept]
    numbers.append(len(plan.moves))
    for move in plan.moves:
        numbers += [move.source, move.target, move.one_way]
    numbers += _encoded_copies(plan.copies)
    numbers.append(len(plan.batches))
    for width, batch in zip(widths, plan.batches, strict=True):
        fed = [row for row in batch if row.feeds_head] if has_divided_head else []
        numbers += [width, len(batch), *_encoded_media(batch, width), *_encoded_head_media(fed, width)]
        for row in batch:
            numbers += [row.slot, row.start, row.num_drafts, row.position_delta, int(row.is_sampling)]
            numbers += [row.adapter, *(_encoded_head(row) if has_divided_head else NO_HEAD)]
            numbers += [len(row.token_ids), *row.token_ids, len(row.blocks), *row.blocks]
    return np.array(numbers, np.int32)


def _encoded_media(batch: Sequence[RowPlan], width: int) -> list[int]:
    return [_has_images(batch, offset=0), *_encoded_grid(position_grid(batch, width))]


def _encoded_head_media(fed: Sequence[RowPlan], width: int) -> list[int]:
    """`fed`: the rows that feed a divided head."""
    return [_has_images(fed, offset=1), *_encoded_grid(head_position_grid(fed, width))]


def _has_images(batch: Sequence[RowPlan], offset: int) -> bool:
    """`offset` 1: among the tokens after the fed ones."""
    return any(
        row.media.within(row.start + offset, row.start + offset + row.num_fed)
        for row in batch
        if row.media is not None
    )


def _encoded_grid(grid: np.ndarray | None) -> list[int]:
    """The numbers of its rows and columns, then its values."""
    return [0, 0] if grid is None else [*grid.shape[1:], *grid.ravel().tolist()]


def _encoded_head(row: RowPlan) -> list[int]:
    return [int(row.feeds_head), int(row.defers_head), row.head_lag, row.num_drafts_next]


def _encoded_copies(copies: PrefixCopies) -> list[int]:
    numbers = [len(copies.drops), *copies.drops, len(copies.saves)]
    for save in copies.saves:
        row_block = NONE if save.row_block is None else save.row_block
        numbers += [save.block_id, save.slot, save.start, save.end, row_block]
        numbers += _encoded_name(save.file_name)
    numbers.append(len(copies.states))
    for state in copies.states:
        numbers += [state.state_id, state.slot, *_encoded_name(state.file_name)]
    numbers.append(len(copies.arrivals))
    for arrival in copies.arrivals:
        numbers += [arrival.id, *_encoded_name(arrival.file_name)]
    numbers.append(len(copies.loads))
    for load in copies.loads:
        numbers += [load.slot, load.start, NONE if load.state_id is None else load.state_id]
        numbers += [len(load.row_blocks), *load.row_blocks, len(load.pieces)]
        for piece in load.pieces:
            numbers += [piece.block_id, piece.first, piece.last]
    return numbers


def decode(message: np.ndarray) -> FollowedStep:
    """The step's plan has shapes that give every pass its width."""
    numbers = iter(message.tolist())
    if next(numbers) != STEP:
        raise ValueError("not the message of a step")
    num_slots, capacity, num_blocks = _take(numbers, 3)
    num_kept = next(numbers)
    kept = None if num_kept == NONE else _take(numbers, num_kept)
    moves = tuple(_move(numbers) for _ in range(next(numbers)))
    copies = _copies(numbers)
    shapes, batches, media = [], [], []
    for _ in range(next(numbers)):
        width, num_rows = _take(numbers, 2)
        shapes.append(PassShape(width=width))
        media.append(PassMedia(*_media(numbers), *_media(numbers)))
        batches.append(tuple(_row(numbers) for _ in range(num_rows)))
    plan = StepPlan(
        num_slots, capacity, moves, tuple(batches), tuple(shapes), copies,
        num_blocks=num_blocks, kept_blocks=kept,
    )  # fmt: skip
    return FollowedStep(plan, tuple(media))


def encode_names(names: Sequence[str]) -> np.ndarray:
    """A question to other ranks: whether they can read these files."""
    numbers = [READ_FILES, len(names)]
    for name in names:
        numbers += _encoded_name(name)
    return np.array(numbers, np.int32)


def decode_names(message: np.ndarray) -> list[str]:
    numbers = iter(message.tolist()[1:])
    return [_name(numbers) or "" for _ in range(next(numbers))]


def _encoded_name(name: str | None) -> list[int]:
    """Its length in bytes, then four bytes in a number."""
    if name is None:
        return [NONE]
    text = name.encode()
    return [len(text), *np.frombuffer(text + bytes(-len(text) % 4), np.int32).tolist()]


def _name(numbers: Iterator[int]) -> str | None:
    num_bytes = next(numbers)
    if num_bytes == NONE:
        return None
    words = np.array(_take(numbers, -(-num_bytes // 4)), np.int32)
    return words.tobytes()[:num_bytes].decode()


def _take(numbers: Iterator[int], num: int) -> tuple[int, ...]:
    return tuple(next(numbers) for _ in range(num))


def _list(numbers: Iterator[int]) -> tuple[int, ...]:
    return _take(numbers, next(numbers))


def _optional(number: int) -> int | None:
    return None if number == NONE else number


def _media(numbers: Iterator[int]) -> tuple[bool, np.ndarray | None]:
    has_images, num_rows, width = _take(numbers, 3)
    grid = np.array(_take(numbers, 3 * num_rows * width), np.int32).reshape(3, num_rows, width)
    return bool(has_images), grid if num_rows else None


def _move(numbers: Iterator[int]) -> Move:
    source, target, one_way = _take(numbers, 3)
    return Move(source, target, bool(one_way))


def _copies(numbers: Iterator[int]) -> PrefixCopies:
    drops = _list(numbers)
    saves = []
    for _ in range(next(numbers)):
        block_id, slot, start, end, row_block = _take(numbers, 5)
        saves.append(SaveCells(block_id, slot, start, end, _name(numbers), _optional(row_block)))
    states = [SaveState(next(numbers), next(numbers), _name(numbers)) for _ in range(next(numbers))]
    arrivals = [Arrival(next(numbers), {}, _name(numbers) or "") for _ in range(next(numbers))]
    loads = []
    for _ in range(next(numbers)):
        slot, start, state_id = _take(numbers, 3)
        row_blocks = _list(numbers)
        pieces = tuple(BlockPiece(*_take(numbers, 3)) for _ in range(next(numbers)))
        loads.append(LoadCells(slot, start, pieces, _optional(state_id), row_blocks))
    return PrefixCopies(drops, tuple(saves), tuple(states), tuple(arrivals), tuple(loads))


def _row(numbers: Iterator[int]) -> RowPlan:
    slot, start, num_drafts, position_delta, is_sampling, adapter = _take(numbers, 6)
    feeds_head, defers_head, head_lag, num_drafts_next = _take(numbers, len(NO_HEAD))
    token_ids, blocks = _list(numbers), _list(numbers)
    return RowPlan(
        sequence_id=slot,
        slot=slot,
        start=start,
        token_ids=token_ids,
        num_drafts=num_drafts,
        next_id=None if is_sampling else 0,
        feeds_head=bool(feeds_head),
        num_drafts_next=num_drafts_next,
        params=NEUTRAL_PARAMS,
        history=(),
        num_prompt=0,
        head_start=start - head_lag,
        defers_head=bool(defers_head),
        position_delta=position_delta,
        blocks=blocks,
        adapter=adapter,
    )
