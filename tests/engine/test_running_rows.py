"""Rows that start, leave, are preempted and come back, and the memory that they have."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import PAGE, Harness, budget_for, crowded, decoding, planned_ids, rows_of

from outrider.config import EngineConfig
from outrider.engine.row_caches import SLACK
from outrider.engine.scheduler import Scheduler
from outrider.plan import CacheGeometry
from outrider.speculate.controller import DepthController

# -- leaving ---------------------------------------------------------------------------------------------


def test_cancelled_row_frees_its_slot_at_the_next_plan() -> None:
    harness = Harness(max_rows=2)
    first, _ = decoding(harness, 2)
    waiting = harness.add(5)
    harness.steps(3)
    assert waiting.slot is None
    harness.cancel(first)
    assert waiting.id in planned_ids(harness.step())


def test_waiting_prefilling_and_decoding_requests_can_be_cancelled() -> None:
    harness = Harness(max_rows=2, prefill_step_size=8)
    (running,) = decoding(harness, 1)
    prefilling, waiting = harness.add(100), harness.add(5)
    harness.steps(2)
    assert 0 < prefilling.num_cached < 100
    for sequence in (waiting, prefilling, running):
        harness.cancel(sequence)
        harness.check()
        assert harness.answer(sequence).finish_reason == "cancelled"
    harness.run_to_idle(most=0)


@pytest.mark.parametrize("leaver", range(5))
def test_row_that_leaves_moves_at_most_one_other_row(leaver: int) -> None:
    harness = Harness(max_rows=5)
    rows = decoding(harness, 5, depth=2)
    harness.cancel(rows[leaver])
    plan = harness.step()
    assert plan is not None
    assert len(plan.moves) == (0 if leaver == 4 else 1)
    assert all(move.one_way for move in plan.moves)
    assert harness.steps(1)[0].moves == ()


def test_row_that_leaves_beside_prefilling_rows_moves_at_most_one_of_each_kind() -> None:
    harness = Harness(max_rows=6, prefill_step_size=8)
    rows = decoding(harness, 3)
    for _ in range(3):
        harness.add(100, max_tokens=2)
    harness.steps(6)
    harness.cancel(rows[0])
    plan = harness.step()
    assert plan is not None
    assert [(move.source, move.target) for move in plan.moves] == [(2, 0), (5, 2)]
    harness.run_to_idle()


def test_row_that_becomes_decoding_changes_places_with_a_prefilling_one() -> None:
    harness = Harness(max_rows=3, prefill_step_size=8)
    slow, quick = harness.add(100, max_tokens=4), harness.add(10, max_tokens=20)
    harness.run_until(lambda: quick.is_decoding)
    plan = harness.step()
    assert plan is not None
    assert [(move.source, move.target, move.one_way) for move in plan.moves] == [(1, 0, False)]
    assert (quick.slot, slow.slot) == (0, 1)
    harness.run_to_idle()


def test_cancelling_who_was_about_to_move_loses_nothing() -> None:
    harness = Harness(max_rows=5)
    rows = decoding(harness, 5, depth=3)
    harness.cancel(rows[1])
    harness.cancel(rows[4])  # would have filled the gap
    harness.step()
    assert sorted(row.slot for row in (rows[0], rows[2], rows[3]) if row.slot is not None) == [0, 1, 2]
    harness.run_to_idle()


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("which", ["decoding", "moving", "prefilling", "picking", "waiting"])
def test_cancel_while_the_step_runs(which: str, raises: bool) -> None:
    harness = Harness(max_rows=5, prefill_step_size=8)
    rows = decoding(harness, 3, depth=3)
    sequences = {
        "decoding": rows[1],
        "moving": rows[2],
        "prefilling": harness.add(100),
        "picking": harness.add(3),
        "waiting": harness.add(5),
    }
    harness.cancel(rows[0])
    harness.runner.raises_next = raises
    harness.step(meanwhile=lambda: harness.cancel(sequences[which]))
    assert harness.answer(sequences[which]).finish_reason == "cancelled"
    harness.run_to_idle()
    assert [answer.error for answer in harness.answers.values()] == [None] * 6


@pytest.mark.parametrize("depth", [0, 8])
def test_row_that_stops_inside_its_accepted_drafts_ends_there(depth: int) -> None:
    harness = Harness(max_rows=6)
    for stop_id in range(6):
        harness.add(5 + stop_id, max_tokens=100, depth=depth, stop_ids=[stop_id])
    for stop_token in range(6):
        harness.add(5 + stop_token, max_tokens=100, depth=depth, stop_token=stop_token)
    harness.run_to_idle()
    assert {answer.finish_reason for answer in harness.answers.values()} == {"stop"}


def test_min_tokens_bans_the_stop_ids_and_only_until_then() -> None:
    harness = Harness()
    every_id = list(range(15))
    sequence = harness.add(5, max_tokens=50, min_tokens=20, depth=8, stop_ids=every_id)
    harness.run_to_idle()
    answer = harness.answer(sequence)
    assert set(answer.token_ids[:20]) == {15}
    assert answer.finish_reason == "stop"


# -- memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 4])
def test_oldest_is_never_preempted_and_the_preempted_come_back_in_order_with_their_tokens(depth: int) -> None:
    harness, rows = crowded(depth, num=4)
    went: list[int] = []
    came_back: list[int] = []
    while harness.live:
        was_in = {row.id: row.slot is not None for row in harness.live.values()}
        was_preempted = {row.id: row.counters.preemptions for row in rows}
        harness.step()
        went += [i for i in reversed(was_in) if rows[i].counters.preemptions > was_preempted[i]]
        came_back += [i for i in was_in if not was_in[i] and was_preempted[i] and rows[i].num_cached]
    assert went[:3] == [3, 2, 1]
    assert came_back[-3:] == [1, 2, 3]
    assert rows[0].counters.preemptions == 0
    assert rows[0].stats().preemptions == 0
    assert rows[3].stats().preemptions > 0
    harness.run_to_idle()


def test_preempted_row_prefills_its_answer_too_and_goes_on() -> None:
    harness, rows = crowded()
    harness.run_until(lambda: rows[2].counters.preemptions > 0)
    known = list(rows[2].tokens)
    assert len(known) > 5
    assert (rows[2].num_prefill, rows[2].num_cached, rows[2].slot) == (len(known), 0, None)
    harness.run_until(lambda: rows[2].num_cached > 0)
    assert rows[2].tokens[: len(known)] == known
    harness.run_to_idle()


def test_row_that_is_preempted_in_the_middle_of_its_prompt_begins_it_again() -> None:
    budget = budget_for(2, 60 + PAGE + SLACK)
    harness = Harness(max_rows=2, prefill_step_size=1, budget_bytes=budget)
    first = harness.add(1, max_tokens=150, depth=8)
    late = harness.add(60, max_tokens=5, depth=2)
    harness.run_until(lambda: late.counters.preemptions > 0)
    assert late.num_generated == 0
    assert first.counters.preemptions == 0
    harness.run_to_idle()


def test_caches_shrink_under_rows_in_high_slots() -> None:
    harness = Harness(max_rows=6, budget_bytes=budget_for(6, 5 + PAGE + SLACK))
    rows = [harness.add(5, max_tokens=100, depth=2) for _ in range(6)]
    harness.steps(2)
    for row in rows[:4]:
        harness.cancel(row)
    shapes = []
    while rows[4].id in harness.live:
        plan = harness.step()
        assert plan is not None
        shapes.append((plan.num_slots, plan.capacity))
    assert shapes[0][0] == 6
    assert min(num_slots for num_slots, _ in shapes) == 2
    assert rows[5].counters.preemptions == 0
    harness.run_to_idle()


def test_caches_lose_capacity_when_the_long_row_has_gone_and_room_is_needed() -> None:
    harness = Harness(max_rows=4, prefill_step_size=500, budget_bytes=budget_for(1, 500 + SLACK))
    harness.add(450, max_tokens=3)
    harness.run_to_idle()
    long = harness.add(450, max_tokens=3)
    short = [harness.add(20, max_tokens=10) for _ in range(4)]
    harness.run_until(lambda: long.id not in harness.live)
    plan = harness.step()
    assert plan is not None
    assert plan.capacity < 100
    assert len(rows_of(plan)) == 4
    assert all(row.counters.preemptions == 0 for row in short)
    harness.run_to_idle()


def test_caches_keep_their_shape_while_there_is_room() -> None:
    """Every change of shape copies all cells."""
    harness = Harness(max_rows=4, prefill_step_size=200)
    long = harness.add(150, max_tokens=3)
    rows = decoding(harness, 3)
    harness.run_until(lambda: long.id not in harness.live)
    harness.cancel(rows[0])
    shapes = {(plan.num_slots, plan.capacity) for plan in harness.steps(10)}
    assert shapes == {(4, harness.geometry.capacity_for(150 + 2 + SLACK))}


def test_where_shapes_are_few_caches_grow_ahead_as_long_as_there_is_room() -> None:
    """Else they are as small as they can be without losing slots: who comes and goes would move the rest."""

    def shapes(num_slots: int, num_cells: int) -> set[tuple[int, int]]:
        harness = Harness(
            max_rows=6,
            prefill_step_size=400,
            budget_bytes=budget_for(num_slots, num_cells),
            controller=DepthController(few_shapes=True),
        )
        for _ in range(5):
            harness.add(300, max_tokens=6)
        return {(plan.num_slots, plan.capacity) for plan in harness.steps(8)}

    needed = PAGE * 21  # 300 and a few more, with what a step may touch
    assert max(shapes(6, 2 * needed)) == (6, PAGE * 24)
    assert max(shapes(6, needed)) == (6, needed)


def test_rows_that_cannot_grow_past_their_page_are_let_in_together() -> None:
    harness = Harness(max_rows=4, budget_bytes=budget_for(4, 2 * PAGE))
    for _ in range(4):
        harness.add(PAGE - 5, max_tokens=5)
    assert len(rows_of(harness.step())) == 2  # as many as the chunk size takes
    harness.step()
    assert harness.scheduler.num_rows == 4
    harness.run_to_idle()


def test_row_too_large_for_the_budget_runs_alone_rather_than_never() -> None:
    """The door refuses such a request; if one gets through, it must not stop the others."""
    harness = Harness(budget_bytes=10)
    assert harness.scheduler.longest_context() == 0
    rows = [harness.add(20, max_tokens=40, depth=3) for _ in range(3)]
    most_rows = 0
    while harness.live:
        most_rows = max(most_rows, len(rows_of(harness.step())))
    assert most_rows == 1
    assert all(row.counters.preemptions == 0 for row in rows)
    harness.run_to_idle()


def test_idle_scheduler_holds_nothing_and_serves_again() -> None:
    harness = Harness()
    for _ in range(3):
        harness.add(50, depth=4)
        harness.run_to_idle()


@given(
    bytes_per_cell=st.integers(1, 10_000),
    bytes_per_slot=st.integers(0, 10**6),
    capacity_step=st.integers(1, 512),
    budget=st.integers(0, 10**9),
)
@settings(deadline=None)
def test_longest_context_is_the_most_that_fits(
    bytes_per_cell: int, bytes_per_slot: int, capacity_step: int, budget: int
) -> None:
    geometry = CacheGeometry(bytes_per_cell, bytes_per_slot, capacity_step)
    longest = Scheduler(EngineConfig(), geometry, budget).longest_context()
    if longest > 0:
        assert geometry.num_bytes(1, geometry.capacity_for(longest + SLACK)) <= budget
    assert geometry.num_bytes(1, geometry.capacity_for(longest + 1 + SLACK)) > budget


@pytest.mark.parametrize("depth", [0, 1, 8])
@pytest.mark.parametrize("capacity_step", [1, 7, 16])
def test_row_of_the_longest_context_runs_to_its_end_within_the_budget(capacity_step: int, depth: int) -> None:
    harness = Harness(geometry=CacheGeometry(3, 10, capacity_step), budget_bytes=500)
    longest = harness.scheduler.longest_context()
    harness.add(longest - 60, max_tokens=60, depth=depth)
    harness.run_to_idle()  # checks the bytes of every step
