"""A step's message to other ranks: everything that their passes need comes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.plan import BlockPiece, LoadCells, Move, PrefixCopies, RowPlan, SaveCells, SaveState, StepPlan
from outrider.request import SamplingParams
from outrider.step import step_message

numbers = st.integers(0, 2**31 - 1)
tuples = st.lists(numbers, max_size=5).map(tuple)


@st.composite
def rows(draw: st.DrawFn) -> RowPlan:
    token_ids = draw(st.lists(numbers, min_size=1, max_size=9).map(tuple))
    return RowPlan(
        sequence_id=draw(numbers), slot=draw(numbers), start=draw(numbers), token_ids=token_ids,
        num_drafts=draw(st.integers(0, len(token_ids) - 1)), next_id=draw(st.none() | numbers),
        feeds_head=True, num_drafts_next=3, params=SamplingParams(temperature=0.7), history=[1, 2],
        num_prompt=2,
        position_delta=draw(st.integers(-1000, 1000)), blocks=draw(tuples),
    )  # fmt: skip


copies = st.builds(
    PrefixCopies,
    tuples,
    st.lists(st.builds(SaveCells, numbers, numbers, numbers, numbers, row_block=st.none() | numbers)).map(
        tuple
    ),
    st.lists(st.builds(SaveState, numbers, numbers)).map(tuple),
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


@given(plans)
def test_a_plan_comes_back(plan: StepPlan) -> None:
    widths = [max(row.num_fed for row in batch) + 1 for batch in plan.batches]
    got = step_message.decode(step_message.encode(plan, widths))
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
            ):
                assert getattr(row, name) == getattr(sent, name), name
