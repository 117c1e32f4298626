"""The table of blocks on its own: none is lost, held twice, or given to a row while others read it."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.engine.block_pool import BlockPool
from outrider.plan import NUM_SPARE_BLOCKS
from patience import in_test_or_soak


class BlockPoolMachine(RuleBasedStateMachine):
    """Rows that take, share and give back blocks, beside a list of what each block holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool()
        self.rows: list[list[int]] = []
        self.texts: list[list[int]] = []  # of each row: what its blocks hold
        self.held: dict[int, int] = {}  # what each block holds
        self.cached: list[int] = []  # ids of cached blocks: each is a text of its own
        self.numbers = itertools.count(1)

    @rule(num=st.integers(1, 6))
    def join(self, num: int) -> None:
        """A row that computes all its blocks."""
        blocks = [self.pool.take() for _ in range(num)]
        texts = [next(self.numbers) for _ in range(num)]
        for block, text in zip(blocks, texts, strict=True):
            assert block >= NUM_SPARE_BLOCKS
            assert all(block not in row for row in self.rows), "a block that another row reads"
            self.held[block] = text
        self.rows.append(blocks)
        self.texts.append(texts)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        """A block is final and becomes a cached one: its text is its id."""
        row = data.draw(st.integers(0, len(self.rows) - 1))
        number = data.draw(st.integers(0, len(self.rows[row]) - 1))
        text = self.texts[row][number]
        self.pool.set_content(self.rows[row][number], text)
        self.cached.append(text)

    @precondition(lambda self: self.cached)
    @rule(data=st.data(), num=st.integers(0, 3))
    def join_with_shared(self, data: st.DataObject, num: int) -> None:
        """A row that begins with cached blocks, and computes some more."""
        blocks, texts = [], []
        for text in data.draw(st.lists(st.sampled_from(self.cached), min_size=1, max_size=4, unique=True)):
            block = self.pool.with_content(text)
            if block is None:
                continue  # no row has it any more
            assert self.held[block] == text, "the block holds another text"
            self.pool.share(block)
            assert self.pool.is_shared(block)
            blocks.append(block)
            texts.append(text)
        for _ in range(num):
            block = self.pool.take()
            assert all(block not in row for row in [*self.rows, blocks])
            text = self.held[block] = next(self.numbers)
            blocks.append(block)
            texts.append(text)
        if blocks:
            self.rows.append(blocks)
            self.texts.append(texts)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, len(self.rows) - 1))
        for block in self.rows.pop(row):
            self.pool.give_back(block)
        self.texts.pop(row)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        gone = data.draw(st.lists(st.sampled_from(self.cached), unique=True))
        self.pool.forget_content([*gone, 10**9])
        assert all(self.pool.with_content(text) is None for text in gone)
        self.cached = [text for text in self.cached if text not in gone]

    @rule(spare=st.integers(0, 5))
    def compact(self, spare: int) -> None:
        kept = self.pool.compact(NUM_SPARE_BLOCKS + self.pool.num_held + spare, self.rows)
        assert kept[:NUM_SPARE_BLOCKS] == tuple(range(NUM_SPARE_BLOCKS))
        self.held = {new: self.held[old] for new, old in enumerate(kept) if new >= NUM_SPARE_BLOCKS}
        assert self.pool.num_free == spare

    @rule(more=st.integers(0, 7))
    def grow(self, more: int) -> None:
        self.pool.grow(self.pool.num_blocks + more)

    @invariant()
    def every_row_reads_its_own_text(self) -> None:
        self.pool.check_integrity(self.rows)
        assert self.pool.num_held == len({block for row in self.rows for block in row})
        for row, texts in zip(self.rows, self.texts, strict=True):
            assert [self.held[block] for block in row] == texts

    def teardown(self) -> None:
        for row in self.rows:
            for block in row:
                self.pool.give_back(block)
        self.pool.check_integrity([])
        self.pool.clear()
        assert self.pool.num_blocks == 0


TestBlockPool = pytest.mark.soak(BlockPoolMachine.TestCase)
BlockPoolMachine.TestCase.settings = settings(
    max_examples=in_test_or_soak(60, 500), stateful_step_count=40, deadline=None
)


@pytest.mark.parametrize(
    ("rows", "message"),
    [([[2], [2]], "held as"), ([[2, 3, 4]], "held as"), ([[2]], "held as"), ([[], [2, 3]], "")],
)
def test_the_check_sees_blocks_that_are_lost_or_doubled(rows: list[list[int]], message: str) -> None:
    pool = BlockPool()
    assert [pool.take(), pool.take()] == [2, 3]
    if not message:
        pool.check_integrity(rows)
        return
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity(rows)


def test_a_pool_is_not_cleared_while_rows_hold_blocks() -> None:
    pool = BlockPool()
    pool.take()
    with pytest.raises(AssertionError, match="holds blocks"):
        pool.clear()
