"""A runner without a model: it executes plans on lists of token ids and checks what a real cache breaks on.

The model: the token after a text is a hash of the whole text, so that a wrong cell changes all that follows.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.plan import (
    NUM_SPARE_BLOCKS,
    UNREAD,
    CacheGeometry,
    Move,
    PrefixCopies,
    RowPlan,
    RowResult,
    SaveCells,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from outrider.prompt_media import MediaPiece
from outrider.request import MAX_DEPTH

VOCAB_SIZE = 16
JUNK = -1  # a cell of which nothing may be assumed

Fault = Callable[[RowPlan], bool]  # whether a step with this row in it raises


class StepFailed(RuntimeError):
    """What a faulty step raises."""


def true_next(token_ids: Sequence[int], banned_ids: Collection[int] = ()) -> int:
    """The model's answer to a text; banned tokens leave the choice to the others."""
    digest = hashlib.blake2b(bytes(token_ids), digest_size=4).digest()
    allowed = [token_id for token_id in range(VOCAB_SIZE) if token_id not in banned_ids]
    return allowed[int.from_bytes(digest, "big") % len(allowed)]


@dataclass(frozen=True)
class FakeLaunched:
    """A step that was run at once, and what it was in the end."""

    plan: StepPlan
    result: StepResult
    is_first_trace: bool = False
    is_as_planned: bool = True


class FakeRunner:
    """Caches as lists: `cells[slot][t]` is the token fed at t, `head[slot][t]` the token after it."""

    image_embeddings: Any = None  # it reads no images

    def __init__(self, geometry: CacheGeometry, seed: int = 0) -> None:
        self.faults: dict[int, Fault] = {}  # by sequence id
        self.raises_next = False
        self.num_raised = 0
        self.kept: dict[int, Sequence[int]] = {}  # by sequence id: positions of the prompt that are read
        self.cells: list[list[int]] = []
        self.head: list[list[int]] = []
        self.rested: list[list[int]] = []  # tokens whose states are kept for a head that rests
        self.states_of: list[list[int] | None] = []  # by slot: the text that a recurrent layer has read
        self.versions: list[list[list[int] | None]] = []  # of states_of, before the overlapped steps
        self.num_restored = 0
        self.blocks: dict[int, tuple[list[int], ...]] = {}  # the prefix cache: cells, head, rested
        self.states: dict[int, list[int]] = {}
        self.most_prefix_bytes = 0
        self.num_loaded = 0
        self.capacity = 0
        self.row_blocks: list[tuple[list[int], ...]] = []  # where cells are kept by blocks: of each block
        self.is_shared: Callable[[int], bool] = lambda block: False  # whether several rows hold a block
        self._geometry = geometry
        self._random = random.Random(seed)

    @property
    def prefix_bytes(self) -> int:
        cells = sum(len(cells) for cells, _, _ in self.blocks.values())
        return cells * self._geometry.bytes_per_cell + len(self.states) * self._geometry.bytes_per_slot

    @property
    def num_bytes(self) -> int:
        if self._geometry.has_blocks:
            return self._geometry.num_bytes_in_blocks(len(self.cells), len(self.row_blocks))
        return self._geometry.num_bytes(len(self.cells), self.capacity)

    def reset(self) -> None:
        self.versions.clear()
        self._resize(0, 0)
        self.row_blocks.clear()

    def encode(self, piece: MediaPiece) -> None:
        raise AssertionError("there are no images here")

    def run(self, plan: StepPlan) -> StepResult:
        return self.finish(self.launch(plan))

    def launch(self, plan: StepPlan, previous: FakeLaunched | None = None) -> FakeLaunched:
        assert plan.is_overlapped == (previous is not None)
        if previous is not None:
            plan = _resolved(plan, previous)
        else:
            self._restore(plan)
        if plan.keeps_states:
            self.versions.append(list(self.states_of))
        self._save(plan.copies)
        for move in plan.moves:
            self._move(move)
        self._resize(plan.num_slots, plan.capacity)
        self._resize_blocks(plan)
        self._load(plan.copies)
        _check_places(plan)
        results = [result for batch in plan.batches for result in self._run_batch(batch)]
        return FakeLaunched(plan, StepResult(tuple(results)))

    def finish(self, launched: FakeLaunched) -> StepResult:
        self._raise_if_faulty(launched.plan)  # the caches were changed: nothing in them may be used again
        return launched.result

    def _restore(self, plan: StepPlan) -> None:
        for restore in plan.restores:
            self.num_restored += 1
            self.states_of[restore.slot] = self.versions[-restore.age][restore.slot]
        self.versions.clear()

    def clear_prefixes(self) -> None:
        self.blocks.clear()
        self.states.clear()

    def _save(self, copies: PrefixCopies) -> None:
        for i in copies.drops:
            self.blocks.pop(i, None)
            self.states.pop(i, None)
        for save in copies.saves:
            assert save.block_id not in self.blocks, "a block saved twice"
            parts = self._saved_parts(save)
            assert len(parts[0]) == save.end - save.start, "cells saved that are not there"
            assert JUNK not in parts[0], "junk saved"
            self.blocks[save.block_id] = parts
        for save in copies.states:
            text = self.states_of[save.slot]
            assert text is not None
            self.states[save.state_id] = text
        self.most_prefix_bytes = max(self.most_prefix_bytes, self.prefix_bytes)

    def _load(self, copies: PrefixCopies) -> None:
        assert not copies.arrivals, "there is no disk here"
        for load in copies.loads:
            start = load.start
            for block, piece in zip(load.row_blocks, load.pieces, strict=self._geometry.has_blocks):
                assert not self.is_shared(block), "a load into a block that another row holds"
                for own, part in zip(self.row_blocks[block], self.blocks[piece.block_id], strict=True):
                    assert piece.last <= len(part)
                    own[piece.first : piece.last] = part[piece.first : piece.last]
                self.num_loaded += piece.last - piece.first
            for piece in () if self._geometry.has_blocks else load.pieces:
                cells, head, rested = self.blocks[piece.block_id]
                end = start + piece.last - piece.first
                assert piece.last <= len(cells)
                assert end <= self.capacity
                self.cells[load.slot][start:end] = cells[piece.first : piece.last]
                self.head[load.slot][start:end] = head[piece.first : piece.last]
                self.rested[load.slot][start:end] = rested[piece.first : piece.last]
                self.num_loaded += end - start
                start = end
            self.states_of[load.slot] = None if load.state_id is None else self.states[load.state_id]

    def _saved_parts(self, save: SaveCells) -> tuple[list[int], ...]:
        if (size := self._geometry.block_size) is None:
            kept = (self.cells, self.head, self.rested)
            return tuple(cells[save.slot][save.start : save.end] for cells in kept)
        assert save.row_block is not None
        first = save.start % size
        return tuple(part[first : first + save.end - save.start] for part in self.row_blocks[save.row_block])

    def _resize_blocks(self, plan: StepPlan) -> None:
        if (size := self._geometry.block_size) is None:
            return
        blocks = self.row_blocks
        if plan.kept_blocks is not None:
            assert plan.kept_blocks[:NUM_SPARE_BLOCKS] == tuple(range(NUM_SPARE_BLOCKS))
            blocks = [blocks[block] for block in plan.kept_blocks]
        junk = [tuple([JUNK] * size for _ in range(3)) for _ in range(plan.num_blocks - len(blocks))]
        self.row_blocks = (blocks + junk)[: plan.num_blocks]

    def _gather(self, row: RowPlan) -> None:
        """Bring a row's blocks into its slot."""
        own = [self.row_blocks[block] for block in row.blocks]
        for number, cells in enumerate((self.cells, self.head, self.rested)):
            cells[row.slot] = [cell for block in own for cell in block[number]]
        self.capacity = len(self.cells[row.slot])

    def _scatter(self, row: RowPlan) -> None:
        """Bring what a row wrote into its blocks, which must be its own alone."""
        size = self._geometry.block_size
        assert size is not None
        first = row.start - (row.head_lag if row.feeds_head else 0)
        for number, block in enumerate(row.blocks):
            assert block >= NUM_SPARE_BLOCKS, "a spare block"
            for part, cells in zip(self.row_blocks[block], (self.cells, self.head, self.rested), strict=True):
                written = cells[row.slot][number * size : (number + 1) * size]
                assert (number + 1) * size > first or written == part, "a write before the row's cells"
                part[:] = written
            if (number + 1) * size > first and number * size < row.start + row.num_fed:
                assert not self.is_shared(block), "a write into a block that another row holds"
        self.cells[row.slot], self.head[row.slot], self.rested[row.slot] = [], [], []
        self.capacity = 0

    def _raise_if_faulty(self, plan: StepPlan) -> None:
        rows = [row for batch in plan.batches for row in batch]
        poisoned = [row for row in rows if row.sequence_id in self.faults]
        if self.raises_next or any(self.faults[row.sequence_id](row) for row in poisoned):
            self.raises_next = False
            self.num_raised += 1
            raise StepFailed("no reason")

    def _move(self, move: Move) -> None:
        source, target = move.source, move.target
        assert source != target, "a move from a slot to itself"
        assert max(source, target) < len(self.cells), "a move outside of the caches"
        states = self.states_of
        states[source], states[target] = states[target], states[source]
        if self._geometry.has_blocks:
            return
        for cells in (self.cells, self.head, self.rested):
            cells[source], cells[target] = cells[target], cells[source]
            if move.one_way:
                cells[source] = [JUNK] * self.capacity

    def _resize(self, num_slots: int, capacity: int) -> None:
        del self.states_of[num_slots:]
        self.states_of += [None] * (num_slots - len(self.states_of))
        for cells in (self.cells, self.head, self.rested):
            del cells[num_slots:]
            for row in cells:
                del row[capacity:]
                row.extend([JUNK] * (capacity - len(row)))
            cells.extend([JUNK] * capacity for _ in range(num_slots - len(cells)))
        self.capacity = capacity

    def _run_batch(self, batch: Sequence[RowPlan]) -> list[RowResult]:
        assert batch, "an empty batch"
        depth = max((row.num_drafts_next for row in batch if row.feeds_head), default=1)
        recursions = depth - 1
        if not self._geometry.has_blocks:
            return [self._run_row(row, recursions) for row in batch]
        results = []
        for row in batch:
            self._gather(row)
            results.append(self._run_row(row, recursions))
            self._scatter(row)
        return results

    def _run_row(self, row: RowPlan, recursions: int) -> RowResult:
        row = self._as_if_read(row)
        self._check_row(row)
        cells, end = self.cells[row.slot], row.start + row.num_fed
        cells[row.start : end] = row.token_ids
        if row.defers_head:
            self.rested[row.slot][row.start : end] = row.token_ids
        targets = self._targets(row)
        num_kept = row.num_fed - row.num_drafts + max(0, len(targets) - 1)
        if self._geometry.bytes_per_slot:  # states cannot be cut: what a row continues must be just its text
            before = [] if row.start == 0 else self.states_of[row.slot]
            assert before == list(row.history[: row.start]), "the state has read another text"
            self.states_of[row.slot] = cells[: row.start + num_kept]
        drafts: Sequence[int] = ()
        if row.feeds_head:
            self._feed_head(row, targets, num_kept, recursions)
            drafts = self._drafts(row, [*cells[: row.start + num_kept], *targets[-1:]])
        return RowResult(row.sequence_id, tuple(targets), tuple(drafts), _logprobs(row, targets))

    def _as_if_read(self, row: RowPlan) -> RowPlan:
        """The row as if the tokens that it skips were not there, once its positions are checked."""
        kept = self.kept.get(row.sequence_id)
        if kept is None:
            assert row.positions is None
            return row
        after = range(row.num_prompt, len(row.history))
        positions = [*kept, *after]
        assert row.position_delta == row.num_prompt - len(kept)
        if row.positions is not None:
            assert list(row.positions) == positions[row.start : row.start + row.num_fed], "other positions"
        else:
            assert row.start >= len(kept), "a part of the prompt at the wrong positions"
        return replace(row, history=[row.history[position] for position in positions], num_prompt=len(kept))

    def _check_row(self, row: RowPlan) -> None:
        history = list(row.history)
        num_committed = row.num_fed - row.num_drafts
        end = row.start + num_committed
        assert num_committed >= 1, "a row that feeds nothing"
        assert 0 <= row.num_drafts <= MAX_DEPTH
        assert 0 <= row.num_drafts_next <= MAX_DEPTH
        assert not (row.defers_head and row.feeds_head)
        assert row.head_lag >= 0
        assert list(row.token_ids[:num_committed]) == history[row.start : end], (
            "not the tokens that come next"
        )
        if row.is_sampling:
            assert end == len(history), "a pick in the middle of the known tokens"
        else:
            assert row.next_id == history[end], "the wrong token for the head"
            assert row.num_drafts == row.num_drafts_next == 0, "drafts in a chunk that is not the last"
        touched = row.start + row.num_fed + max(0, row.num_drafts_next - 1)
        assert touched <= self.capacity, f"{touched} cells touched where there are {self.capacity}"
        assert self.cells[row.slot][: row.start] == history[: row.start], "the cells hold another text"
        if row.feeds_head:
            headed = row.start - row.head_lag
            assert self.head[row.slot][:headed] == history[1 : headed + 1], "the head holds another text"
            missed = slice(headed, row.start)
            assert self.rested[row.slot][missed] == history[missed], "what the head missed was not kept"

    def _targets(self, row: RowPlan) -> list[int]:
        """The picked tokens: accepted drafts and the bonus."""
        if not row.is_sampling:
            return []
        drafts = row.token_ids[row.num_fed - row.num_drafts :]
        known = self.cells[row.slot][: row.start + row.num_fed - row.num_drafts]
        targets: list[int] = []
        for i in range(row.num_drafts + 1):
            targets.append(self._true_next(row, known + targets))
            if i < row.num_drafts and targets[-1] != drafts[i]:
                break
        return targets

    def _feed_head(self, row: RowPlan, targets: list[int], num_kept: int, recursions: int) -> None:
        """The pairs of the kept cells; junk over what was rejected and where the recursion writes."""
        last = targets if row.is_sampling else [row.next_id]
        known = [*row.token_ids[1 : row.num_fed - row.num_drafts], *last]
        end = row.start + num_kept
        head_cached = row.start - row.head_lag
        self.head[row.slot][head_cached : row.start] = row.history[head_cached + 1 : row.start + 1]
        self.head[row.slot][row.start : end] = known
        clobbered = max(row.start + row.num_fed, end + max(0, recursions))
        for cell in range(end, min(clobbered, self.capacity)):
            self.head[row.slot][cell] = JUNK

    def _drafts(self, row: RowPlan, known: list[int]) -> list[int]:
        """The truth up to a random place, then anything: every accepted length comes up."""
        num_right = self._random.randint(0, row.num_drafts_next)
        drafts: list[int] = []
        for i in range(row.num_drafts_next):
            right = self._true_next(row, known + drafts)
            drafts.append(right if i < num_right else self._random.randrange(VOCAB_SIZE))
        return drafts

    @staticmethod
    def _true_next(row: RowPlan, token_ids: list[int]) -> int:
        is_short = len(token_ids) - row.num_prompt < row.params.min_tokens
        return true_next(token_ids, row.banned_ids if is_short else ())


def _resolved(plan: StepPlan, after: FakeLaunched) -> StepPlan:
    """What a plan means that was made before the step in front of it was read."""
    assert not plan.moves
    assert not plan.copies
    assert not plan.restores
    assert (plan.num_slots, plan.capacity) == (after.plan.num_slots, after.plan.capacity)
    assert (plan.num_blocks, plan.kept_blocks) == (after.plan.num_blocks, None)
    (batch,), (before,) = plan.batches, after.plan.batches
    rows = [_resolved_row(*each) for each in zip(batch, before, after.result.rows, strict=True)]
    return replace(plan, batches=(tuple(rows),))


def _resolved_row(row: RowPlan, before: RowPlan, result: RowResult) -> RowPlan:
    assert (row.sequence_id, row.slot) == (before.sequence_id, before.slot)
    assert set(row.token_ids) == {UNREAD}
    assert row.num_drafts <= len(result.drafts)
    assert not (row.feeds_head and before.defers_head), (
        "a head cannot catch up with tokens that nobody has read"
    )
    assert not row.banned_ids
    start = before.start + before.num_fed - before.num_drafts + result.num_accepted
    assert start <= row.start, "more cells than the plan allows for"
    end = before.start + before.num_fed - before.num_drafts + before.position_delta
    history = [*before.history[:end], *result.token_ids]
    return replace(
        row,
        start=start,
        token_ids=(result.token_ids[-1], *result.drafts[: row.num_drafts]),
        history=history,
        head_start=None if row.head_start is None else start - row.head_lag,
    )


def _check_places(plan: StepPlan) -> None:
    rows = [row for batch in plan.batches for row in batch]
    assert len({row.slot for row in rows}) == len(rows), "two rows in one slot"
    assert len({row.sequence_id for row in rows}) == len(rows), "a sequence in two rows"
    assert all(0 <= row.slot < plan.num_slots for row in rows), "a row outside of the caches"


def _logprobs(row: RowPlan, targets: list[int]) -> tuple[TokenLogprobs, ...]:
    if row.params.logprobs is None:
        return ()
    return tuple(TokenLogprobs(token_id, 0.0, ()) for token_id in targets)
