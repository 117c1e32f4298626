"""The slot table on its own: whoever joins and leaves, the cells follow their rows with few moves."""

from __future__ import annotations

import itertools

import pytest
from fake_runner import FakeRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import FakeText

from outrider.engine.row_caches import SlotTable
from outrider.engine.sequence import Sequence
from outrider.plan import CacheGeometry, Move
from outrider.request import Request, SamplingParams

PROMPT = 4
_ids = itertools.count()


def new_row(num_cached: int = 0) -> Sequence:
    """A row of four prompt tokens: prefilling while fewer are cached, decoding from then on."""
    request = Request("r", tuple([1] * PROMPT), SamplingParams())
    row = Sequence(next(_ids), request, FakeText(), frozenset(), max_tokens=9)
    row.num_cached = num_cached
    return row


def table_of(*num_cached: int | None) -> tuple[SlotTable, list[Sequence | None]]:
    """A table with these rows in this order; None: a slot that its row has left."""
    table = SlotTable()
    rows = [new_row(num or 0) for num in num_cached]
    for row in rows:
        table.join(row)
    for row, num in zip(rows, num_cached, strict=True):
        if num is None:
            table.leave(row)
    return table, [row if num is not None else None for row, num in zip(rows, num_cached, strict=True)]


def test_rows_join_in_the_lowest_free_slot() -> None:
    table, rows = table_of(PROMPT, None, PROMPT, None)
    late = new_row()
    table.join(late)
    assert late.slot == 1
    assert (len(table), table.num_spanned) == (3, 3)
    assert list(table.sequences()) == [rows[0], late, rows[2]]


@pytest.mark.parametrize(
    ("before", "moves"),
    [
        ([], []),
        ([PROMPT, PROMPT, 2, 0], []),
        ([None, PROMPT, PROMPT], [Move(2, 0, True)]),
        ([PROMPT, None, PROMPT], [Move(2, 1, True)]),
        ([None, None, None, PROMPT], [Move(3, 0, True)]),
        ([2, PROMPT], [Move(1, 0, False)]),
        ([0, PROMPT], [Move(1, 0, True)]),
        ([None, 2], [Move(1, 0, True)]),
        ([None, 0], []),
        ([2, 2, PROMPT, PROMPT], [Move(3, 0, False), Move(2, 1, False)]),
        ([PROMPT, None, 2, 0, 3], [Move(4, 1, True)]),
        ([None, PROMPT, None, 2], [Move(1, 0, True), Move(3, 1, True)]),
    ],
)
def test_settling_makes_these_moves(before: list[int | None], moves: list[Move]) -> None:
    table, _ = table_of(*before)
    assert table.settle() == moves
    assert table.settle() == []


def test_leaving_twice_is_noticed() -> None:
    table, (row,) = table_of(PROMPT)
    assert row is not None
    table.leave(row)
    with pytest.raises(AssertionError):
        table.leave(row)


# A turn of a history: rows that join, slots (modulo the rows there are) that are left, and rows that grow.
turns = st.tuples(st.integers(0, 3), st.lists(st.integers(0, 20), max_size=3), st.lists(st.integers(0, 20)))


@given(st.lists(turns, max_size=12))
@settings(max_examples=300, deadline=None)
def test_cells_follow_their_rows_through_any_history(history: list[tuple[int, list[int], list[int]]]) -> None:
    table = SlotTable()
    runner = FakeRunner(CacheGeometry(bytes_per_cell=1))
    rows: list[Sequence] = []
    for num_joining, leaving, growing in history:
        for _ in range(num_joining):
            rows.append(new_row())
            table.join(rows[-1])
        for which in leaving:
            if rows:
                table.leave(rows.pop(which % len(rows)))
        _settle_and_check(table, runner, rows)
        for which in growing:
            if rows:
                _grow(rows[which % len(rows)], runner)


def _settle_and_check(table: SlotTable, runner: FakeRunner, rows: list[Sequence]) -> None:
    num_strays = sum(row.slot is not None and row.slot >= len(rows) for row in rows)
    num_decoding = sum(row.is_decoding for row in rows)
    num_late = sum(row.is_decoding and row.slot is not None and row.slot >= num_decoding for row in rows)
    moves = table.settle()
    assert len(moves) <= num_strays + 2 * num_late
    for move in moves:
        runner._move(move)
    runner._resize(len(rows), PROMPT + 1)
    assert len(table) == table.num_spanned == len(rows)
    assert sorted(row.slot for row in rows if row.slot is not None) == list(range(len(rows)))
    assert all(row.is_decoding == (row.slot is not None and row.slot < num_decoding) for row in rows)
    for row in rows:
        assert row.slot is not None
        assert runner.cells[row.slot][: row.num_cached] == [row.id] * row.num_cached


def _grow(row: Sequence, runner: FakeRunner) -> None:
    assert row.slot is not None
    if row.num_cached < PROMPT:
        runner.cells[row.slot][row.num_cached] = row.id
        row.num_cached += 1
