"""Who starts next: preempted rows, tenants in turn, priorities, first come; and nobody starves."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_harness import FakeText, Harness

from outrider.engine.sequence import Sequence
from outrider.engine.waiting_queue import MAX_OVERTAKEN, WaitingQueue
from outrider.request import InvalidRequest, Request, SamplingParams

_ids = itertools.count()


def waiting(tenant: str = "", priority: int = 0) -> Sequence:
    number = next(_ids)
    params = SamplingParams(tenant=tenant, priority=priority)
    return Sequence(number, Request(f"r{number}", (1,), params), FakeText(), frozenset(), 4)


def queue_of(*sequences: Sequence) -> WaitingQueue:
    queue = WaitingQueue()
    for sequence in sequences:
        queue.add(sequence)
    return queue


def taken(queue: WaitingQueue) -> list[Sequence]:
    found = []
    while queue:
        upcoming = queue.next
        found.append(queue.take())
        assert found[-1] is upcoming
    assert queue.next is None
    return found


def test_first_come_is_first_served_within_a_tenant() -> None:
    rows = [waiting("a") for _ in range(5)]
    assert taken(queue_of(*rows)) == rows


def test_a_tenant_with_many_requests_does_not_hold_up_another() -> None:
    many, one, two = [waiting("a") for _ in range(100)], waiting("b"), waiting("c")
    order = taken(queue_of(*many, one, two))
    assert order[:4] == [many[0], one, two, many[1]]
    assert order[4:] == many[2:]


def test_tenants_take_turns_also_when_they_come_back() -> None:
    queue = queue_of(*(waiting("a") for _ in range(4)))
    queue.take()
    for _ in range(2):
        queue.add(waiting("b"))
    assert [queue.take().params.tenant for _ in range(5)] == ["a", "b", "a", "b", "a"]


def test_lower_priority_values_start_first() -> None:
    late, normal, urgent, second = waiting(priority=5), waiting(), waiting(priority=-3), waiting()
    assert taken(queue_of(late, normal, urgent, second)) == [urgent, normal, second, late]


def test_a_priority_does_not_overtake_another_tenant() -> None:
    patient, greedy = [waiting("a") for _ in range(2)], [waiting("b", priority=-1000) for _ in range(2)]
    assert taken(queue_of(*patient, *greedy)) == [patient[0], greedy[0], patient[1], greedy[1]]


def test_a_request_of_high_priority_value_does_not_starve() -> None:
    last = waiting(priority=1000)
    queue = queue_of(last, waiting(priority=-1000))
    for num_before in range(10 * MAX_OVERTAKEN):
        if queue.take() is last:
            assert num_before == MAX_OVERTAKEN
            return
        queue.add(waiting(priority=-1000))  # they never stop coming
    raise AssertionError("it starved")


def test_every_request_starts_however_many_of_lower_value_keep_coming() -> None:
    """Three tenants whose urgent requests never end, and an old one of each value in between."""
    old = [waiting(tenant, priority) for tenant in "abc" for priority in (0, 10, 500, 1000)]
    queue, left = queue_of(*old), {row.id for row in old}
    for _ in range(3 * 4 * (MAX_OVERTAKEN + 1)):
        for tenant in "abc":
            queue.add(waiting(tenant, -1000))
        left.discard(queue.take().id)
    assert not left


def test_preempted_rows_come_back_before_anything_new_starts() -> None:
    new, older, younger = waiting(priority=-1000), waiting("b", 1000), waiting("b", 1000)
    queue = queue_of(new)
    queue.add_returning(younger)
    queue.add_returning(older)
    assert taken(queue) == [older, younger, new]


def test_a_cancelled_request_leaves_no_trace() -> None:
    rows = [waiting("a", priority) for priority in (3, -3, 0)]
    returning = waiting("b")
    queue = queue_of(*rows)
    queue.add_returning(returning)
    for row in (returning, rows[1], rows[0]):
        queue.remove(row)
    assert list(queue) == [rows[2]]
    assert taken(queue) == [rows[2]]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 2), st.sampled_from(["add", "take", "drop"])))
)
def test_every_request_is_taken_once(moves: list[tuple[str, int, str]]) -> None:
    queue, inside, out = WaitingQueue(), [], []
    for tenant, priority, move in moves:
        if move == "add" or not inside:
            inside.append(waiting(tenant, priority))
            queue.add(inside[-1])
        elif move == "take":
            out.append(queue.take())
            inside.remove(out[-1])
        else:
            queue.remove(inside.pop(priority % len(inside)))
        assert len(queue) == len(inside)
        assert sorted(row.id for row in queue) == sorted(row.id for row in inside)
    rest = taken(queue)
    assert sorted(row.id for row in rest) == sorted(row.id for row in inside)


def test_the_scheduler_starts_requests_in_this_order() -> None:
    harness = Harness(max_rows=1)
    first = harness.add(5, max_tokens=2)
    harness.step()
    order: list[int] = []
    rows = {
        "low": harness.add(5, max_tokens=1, tenant="a", priority=7),
        "urgent": harness.add(5, max_tokens=1, tenant="a", priority=-7),
        "other": harness.add(5, max_tokens=1, tenant="b"),
    }
    while harness.live:
        plan = harness.step()
        order += [row.sequence_id for batch in plan.batches for row in batch] if plan is not None else []
    assert order == [first.id, rows["urgent"].id, rows["other"].id, rows["low"].id]


@pytest.mark.parametrize("priority", [1001, -1001, 1.5, True, None, "1"])
def test_a_priority_out_of_range_is_refused(priority: Any) -> None:
    with pytest.raises(InvalidRequest, match="priority must be a whole number from -1000 to 1000"):
        SamplingParams(priority=priority)
