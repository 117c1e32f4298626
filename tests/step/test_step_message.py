"""A step's message to other ranks: everything that their passes need comes back."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.cache.placement import GridPositions
from outrider.plan import (
    Arrival,
    BlockPiece,
    LoadCells,
    Move,
    PrefixCopies,
    RowPlan,
    SaveCells,
    SaveState,
    StepPlan,
)
from outrider.prompt_media import MediaPiece, PromptMedia
from outrider.request import SamplingParams
from outrider.step import step_message
from outrider.step.batch import head_positions_of, positions_of

numbers = st.integers(0, 2**31 - 1)
tuples = st.lists(numbers, max_size=5).map(tuple)
names = st.text("0123456789abcdef-st", max_size=70)


@st.composite
def rows(draw: st.DrawFn) -> RowPlan:
    token_ids = draw(st.lists(numbers, min_size=1, max_size=9).map(tuple))
    return RowPlan(
        sequence_id=draw(numbers), slot=draw(numbers), start=draw(numbers), token_ids=token_ids,
        num_drafts=draw(st.integers(0, len(token_ids) - 1)), next_id=draw(st.none() | numbers),
        feeds_head=draw(st.booleans()), num_drafts_next=draw(st.integers(0, 8)),
        params=SamplingParams(temperature=0.7), history=[1, 2], num_prompt=2,
        head_start=draw(st.none() | st.integers(0, 9)), defers_head=draw(st.booleans()),
        position_delta=draw(st.integers(-1000, 1000)), blocks=draw(tuples),
        adapter=draw(numbers),
    )  # fmt: skip


copies = st.builds(
    PrefixCopies,
    tuples,
    st.lists(
        st.builds(SaveCells, numbers, numbers, numbers, numbers, st.none() | names, st.none() | numbers)
    ).map(tuple),
    st.lists(st.builds(SaveState, numbers, numbers, st.none() | names)).map(tuple),
    st.lists(st.builds(Arrival, numbers, st.just({}), names)).map(tuple),
    loads=st.lists(
        st.builds(
            LoadCells,
            numbers,
            numbers,
            st.lists(st.builds(BlockPiece, numbers, numbers, numbers)).map(tuple),
            st.none() | numbers,
            tuples,
        )
    ).map(tuple),
)
plans = st.builds(
    StepPlan,
    numbers,
    numbers,
    st.lists(st.builds(Move, numbers, numbers, st.booleans())).map(tuple),
    st.lists(st.lists(rows(), min_size=1, max_size=4).map(tuple), max_size=2).map(tuple),
    copies=copies,
    num_blocks=numbers,
    kept_blocks=st.none() | tuples,
)


@given(st.lists(names, max_size=5))
def test_names_of_files_come_back(asked: list[str]) -> None:
    assert step_message.decode_names(step_message.encode_names(asked)) == asked


@given(st.integers(1, 3), st.integers(1, 9), st.integers(0, 40))
def test_images_and_their_positions_come_back(num_rows: int, num_fed: int, start: int) -> None:
    cells = np.arange(5, 15)
    positions = np.random.default_rng(start).integers(0, 99, (3, 30)).astype(np.int32)
    media = PromptMedia((MediaPiece("key", {}, cells),), positions, delta=-4)
    plain = RowPlan(
        1, 0, start, tuple(range(num_fed)), 0, None, False, 0, SamplingParams(), [1], 1, position_delta=3
    )
    batch = (*[plain] * (num_rows - 1), replace(plain, slot=1, media=media))
    plan = StepPlan(2, 64, (), (batch,))
    (found,) = step_message.decode(step_message.encode(plan, [num_fed + 1])).media
    assert found.has_images == (start < 15 and start + num_fed > 5)
    assert found.positions is not None
    expected = positions_of(batch, mx.array([start] * num_rows), num_fed + 1, None)
    assert isinstance(expected, GridPositions)
    assert np.array_equal(found.positions, np.array(expected.grid))


@given(st.booleans(), st.integers(0, 3), st.integers(0, 40))
def test_the_images_of_a_divided_head_and_their_positions_come_back(
    feeds_head: bool, head_lag: int, start: int
) -> None:
    cells = np.arange(5, 15)
    positions = np.random.default_rng(start).integers(0, 99, (3, 60)).astype(np.int32)
    media = PromptMedia((MediaPiece("key", {}, cells),), positions, delta=-4)
    plain = RowPlan(1, 0, start + 3, (1, 2), 0, None, feeds_head, 2, SamplingParams(), [1], 1)
    with_image = replace(plain, slot=1, media=media, head_start=start + 3 - head_lag)
    batch = replace(plain, feeds_head=False), with_image
    plan = StepPlan(2, 64, (), (batch,))
    (found,) = step_message.decode(step_message.encode(plan, [2], has_divided_head=True)).media
    assert found.head_has_images == (feeds_head and start + 4 < 15 and start + 6 > 5)
    assert (found.head_positions is not None) == feeds_head
    if found.head_positions is not None:
        expected = head_positions_of([with_image], mx.array([start + 3]), 2, None)
        assert isinstance(expected, GridPositions)
        assert np.array_equal(found.head_positions, np.array(expected.grid))


@given(plans, st.booleans())
def test_a_plan_comes_back(plan: StepPlan, has_divided_head: bool) -> None:
    widths = [max(row.num_fed for row in batch) + 1 for batch in plan.batches]
    got = step_message.decode(step_message.encode(plan, widths, has_divided_head)).plan
    for name in ("num_slots", "capacity", "moves", "copies", "num_blocks", "kept_blocks"):
        assert getattr(got, name) == getattr(plan, name), name
    assert [shape.width for shape in got.shapes] == widths
    for batch, own in zip(got.batches, plan.batches, strict=True):
        for row, sent in zip(batch, own, strict=True):
            for name in (
                "slot",
                "start",
                "token_ids",
                "num_drafts",
                "position_delta",
                "is_sampling",
                "blocks",
                "adapter",
            ):
                assert getattr(row, name) == getattr(sent, name), name
            for name in ("feeds_head", "defers_head", "head_lag", "num_drafts_next"):
                assert getattr(row, name) == (getattr(sent, name) if has_divided_head else 0), name
