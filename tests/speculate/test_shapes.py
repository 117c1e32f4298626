"""ShapePolicy: few where new ones are slow to begin with, and never dear."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.speculate.costs import CostTable, HeadCost, MeasuredCosts
from outrider.speculate.shapes import (
    CELL_PARTS,
    CELL_STEP,
    FEW_DEPTHS,
    FEW_ROW_COUNTS,
    FEW_WIDTHS,
    FREE_PADDING,
    MAX_PADDING,
    ShapePolicy,
    num_slots_for,
    rounded_up,
)

WIDTHS = range(1, 10)
FLAT = {(rows, width): 1.0 + 0.001 * rows * width for rows in (1, 32) for width in WIDTHS}
LINEAR = {(rows, width): 1.0 * rows * width for rows in (1, 32) for width in WIDTHS}
SLOPED = {(rows, width): 1.0 + 0.1 * rows for rows in (1, 32) for width in WIDTHS}


def shapes(trunk: dict[tuple[int, int], float], few: bool = True, cell_s: float = 0.0) -> ShapePolicy:
    return ShapePolicy(CostTable(MeasuredCosts(trunk, {1: HeadCost(0.1, 0.1, 0.1)}, 128, cell_s)), few)


def test_where_rows_cost_nothing_all_numbers_of_them_have_one_shape() -> None:
    found = {shapes(FLAT).decode_shape(rows, 1, 100, 32) for rows in range(1, 33)}
    assert found == {(32, 1)}


def test_where_every_token_costs_nothing_is_padded_by_much() -> None:
    dear = shapes(LINEAR)
    for rows in range(1, 33):
        for width in WIDTHS:
            wide, wider = dear.decode_shape(rows, width, 100, 32)
            assert wide * wider <= 1.35 * rows * width
    assert dear.decode_shape(1, 4, 100, 32) == (1, 5)
    assert dear.decode_shape(5, 1, 100, 32) == (6, 1)
    assert dear.decode_shape(5, 4, 100, 32) == (5, 4)


def test_a_pass_that_comes_often_has_a_shape_of_its_own_where_that_costs_less() -> None:
    found = shapes(SLOPED)
    assert found.decode_shape(17, 1, 100, 32) == (24, 1)
    for _ in range(40):
        found.count_step(17, 1)
    assert found.decode_shape(17, 1, 100, 32) == (17, 1)
    assert found.decode_shape(18, 1, 100, 32) == (24, 1)
    for _ in range(120):
        found.count_step(3, 1)
    assert found.decode_shape(17, 1, 100, 32) == (24, 1)


def test_a_shape_that_is_one_of_few_is_padded_for_nothing_only() -> None:
    assert shapes(SLOPED).decode_shape(16, 1, 100, 32) == (16, 1)
    assert shapes(SLOPED).decode_shape(12, 2, 100, 32) == (12, 2)


def test_long_rows_are_not_padded_with_rows_that_read_as_much() -> None:
    dear = shapes(FLAT, cell_s=1e-5)
    assert dear.decode_shape(1, 1, 100, 32) == (32, 1)
    assert dear.decode_shape(1, 1, 10_000, 32) == (1, 1)


def test_caches_grow_in_few_steps() -> None:
    sizes = {cells: shapes(FLAT).capacity(cells, 256) for cells in range(256, 32_769, 256)}
    assert all(cells <= size <= 1.5 * cells + 256 for cells, size in sizes.items())
    assert len(set(sizes.values())) <= 16
    assert shapes(FLAT, few=False).capacity(768, 256) == 768


def test_a_width_is_one_of_few() -> None:
    found = {shapes(FLAT).decode_shape(1, width, 100, 1)[1] for width in WIDTHS}
    assert found == set(FEW_WIDTHS) >= {1 + depth for depth in FEW_DEPTHS}


def test_without_need_a_pass_is_as_large_as_its_rows() -> None:
    exact = shapes(FLAT, few=False)
    assert exact.decode_shape(5, 4, 100, 32) == (5, 4)
    assert exact.prefill_width(37) == 37
    assert list(exact.depths) == list(range(9))


@given(
    rows=st.integers(1, 40), spare=st.integers(0, 40), width=st.sampled_from(WIDTHS),
    cells=st.integers(0, 9000), each=st.floats(0, 0.1), cell_s=st.floats(0, 1e-5),
)  # fmt: skip
def test_padding_fits_and_costs_next_to_nothing(
    rows: int, spare: int, width: int, cells: int, each: float, cell_s: float
) -> None:
    trunk = {(r, w): 1.0 + each * r * w for r in (1, 8, 32) for w in WIDTHS}
    made = shapes(trunk, cell_s=cell_s)
    costs, num_slots = made._costs, rows + spare
    long = rounded_up(cells, CELL_STEP, CELL_PARTS)
    for limit, num_noted in ((MAX_PADDING, 1), (FREE_PADDING, 40)):
        for _ in range(num_noted):
            made.count_step(rows, width)
        wide, wider = made.decode_shape(rows, width, cells, num_slots)
        assert rows <= wide <= num_slots
        assert width <= wider <= 9
        assert costs.uncorrected_s(wide, wider, long) <= limit * costs.uncorrected_s(rows, width, long)


def test_prompts_have_few_widths_and_grow_little() -> None:
    widths = {size: shapes(FLAT).prefill_width(size) for size in range(1, 4097)}
    assert all(size <= width for size, width in widths.items())
    assert all(width - size < max(16, size / 8 + 1) for size, width in widths.items())
    assert len(set(widths.values())) <= 64


@pytest.mark.parametrize(("rows", "slots"), [(1, 1), (5, 6), (9, 12), (33, 48), (200, 200)])
def test_slots_are_made_for_some_more_rows(rows: int, slots: int) -> None:
    assert num_slots_for(rows) == slots
    assert rows > max(FEW_ROW_COUNTS) or slots in FEW_ROW_COUNTS
