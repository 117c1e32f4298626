"""The scheduler's promises, each named after the failure that it rules out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Tokens

import pytest
from fake_runner import StepFailed
from scheduler_harness import FOREVER, PAGE, Harness, budget_for, crowded, decoding, planned_ids, rows_of

from outrider.engine.row_caches import SLACK
from outrider.engine.scheduler import MAX_FAILURES
from outrider.plan import StepResult
from outrider.speculate.drafter import Proposal
from outrider.speculate.ngram import NgramDrafter

# -- prefill beside decode -------------------------------------------------------------------------------


def test_new_request_is_prefilled_in_the_next_step_while_others_decode() -> None:
    harness = Harness()
    running = decoding(harness, 2, depth=4)
    late = harness.add(10, depth=4)
    plan = harness.step()
    assert planned_ids(plan) == [running[0].id, running[1].id, late.id]
    assert late.num_generated == 1
    harness.run_to_idle()


def test_long_prompt_does_not_stall_running_streams() -> None:
    harness = Harness(max_rows=4, prefill_step_size=64)
    running = [harness.add(5, max_tokens=1000, depth=3) for _ in range(3)]
    harness.step()
    late = harness.add(10_000, max_tokens=1)
    while late.num_generated == 0:
        before = [row.num_generated for row in running]
        plan = harness.step()
        assert planned_ids(plan) == [*(row.id for row in running), late.id]
        assert all(row.num_generated > num for row, num in zip(running, before, strict=True))
    assert harness.num_steps >= 10_000 / 64
    harness.run_to_idle()


def test_short_prompt_is_not_stuck_behind_long_ones() -> None:
    harness = Harness(max_rows=4, prefill_step_size=32)
    for _ in range(3):
        harness.add(2000, max_tokens=1)
    harness.steps(4)
    short = harness.add(10, max_tokens=1)
    assert harness.run_until(lambda: short.id not in harness.live) <= 4  # a turn each, and its own
    harness.run_to_idle()


def test_long_prompts_take_turns() -> None:
    harness = Harness(max_rows=3, prefill_step_size=10)
    longs = [harness.add(100, max_tokens=1) for _ in range(3)]
    turns = [planned_ids(plan) for plan in harness.steps(9)]
    assert turns == [[row.id] for row in longs] * 3
    harness.run_to_idle()


def test_short_prompts_are_prefilled_together() -> None:
    harness = Harness(max_rows=6, prefill_step_size=64)
    short = [harness.add(10, max_tokens=3) for _ in range(6)]
    plan = harness.step()
    assert plan is not None
    assert [len(batch) for batch in plan.batches] == [6]
    assert all(row.num_generated == 1 for row in short)


def test_padding_counts_when_prompts_are_prefilled_together() -> None:
    harness = Harness(max_rows=6, prefill_step_size=64)
    lengths = [30, 5, 31, 33, 2]
    for length in lengths:
        harness.add(length, max_tokens=3)
    plan = harness.step()
    assert [row.num_fed for row in rows_of(plan)] == [30, 5]  # two rows as wide as the widest fill 60 of 64
    harness.run_to_idle()


def test_chunked_prompt_tells_the_head_the_token_after_each_chunk() -> None:
    harness = Harness(prefill_step_size=10)
    sequence = harness.add(25, depth=2)
    rows = [rows_of(plan)[0] for plan in harness.steps(3)]
    assert [row.start for row in rows] == [0, 10, 20]
    assert [row.next_id for row in rows] == [sequence.tokens[10], sequence.tokens[20], None]
    assert [row.num_drafts_next for row in rows] == [0, 0, 2]


# -- depth -----------------------------------------------------------------------------------------------


def test_depth_of_the_batch_is_not_bounded_by_the_row_with_fewest_tokens_left() -> None:
    harness = Harness()
    deep = harness.add(5, max_tokens=FOREVER, depth=8)
    short = harness.add(5, max_tokens=2, depth=8)
    plain = harness.add(5, max_tokens=FOREVER, depth=0)
    harness.step()
    drafts = {row.sequence_id: row.num_drafts for row in rows_of(harness.step())}
    assert drafts == {deep.id: 8, short.id: 0, plain.id: 0}


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 9, 10])
def test_nothing_is_drafted_past_max_tokens(max_tokens: int, on_host: bool) -> None:
    harness = Harness()
    drafter = NgramDrafter() if on_host else None
    sequence = harness.add([1, 2, 3] * 10, max_tokens=max_tokens, depth=8, drafter=drafter)
    while sequence.id in harness.live:
        num_left = sequence.num_left
        (row,) = rows_of(harness.step())
        assert row.num_drafts + 1 <= num_left
        assert row.num_drafts_next <= max(0, num_left - 2)
    assert sequence.num_generated == max_tokens
    harness.run_to_idle()


@pytest.mark.parametrize("depth", range(9))
def test_answer_does_not_depend_on_the_depth(depth: int) -> None:
    harness = Harness()
    sequence = harness.add([1, 2, 3], max_tokens=50, depth=depth)
    harness.run_to_idle()  # compares with plain decoding
    assert sequence.num_generated == 50


def test_statistics_count_drafts_by_their_position() -> None:
    harness = Harness()
    sequence = harness.add(5, max_tokens=100, depth=3)
    harness.run_to_idle()
    stats = sequence.stats()
    assert len(stats.drafted) == len(stats.accepted) == 3
    assert list(stats.accepted) == sorted(stats.accepted, reverse=True)
    assert all(0 < got < asked for got, asked in zip(stats.accepted, stats.drafted, strict=True))
    assert stats.steps + sum(stats.accepted) == stats.num_generated == 100


# -- failures --------------------------------------------------------------------------------------------


def test_rows_sent_back_by_a_failure_come_back_oldest_first() -> None:
    harness = Harness(max_rows=3, budget_bytes=budget_for(3, 5 + PAGE + SLACK))
    rows = [harness.add(5, max_tokens=100) for _ in range(3)]
    harness.run_until(lambda: rows[0].num_generated > PAGE)  # now only two may join again
    harness.runner.raises_next = True
    harness.step()
    harness.step()
    assert [row.slot is not None for row in rows] == [True, True, False]
    harness.run_to_idle()


def test_failed_step_loses_no_token_and_keeps_the_order() -> None:
    harness = Harness(max_rows=2)
    rows = decoding(harness, 2, depth=2)
    waiting = harness.add(5)
    known = [list(row.tokens) for row in rows]
    harness.runner.raises_next = True
    harness.step()
    assert [list(row.tokens) for row in rows] == known
    assert harness.scheduler.num_bytes == 0
    assert harness.scheduler.num_waiting == 3
    harness.step()
    assert waiting.slot is None
    harness.run_to_idle()
    assert {answer.finish_reason for answer in harness.answers.values()} == {"length"}


def test_rows_share_a_batch_again_soon_after_a_failed_step() -> None:
    harness = Harness(max_rows=4)
    rows = decoding(harness, 4, depth=2)
    harness.runner.raises_next = True
    harness.step()
    num_steps = harness.run_until(lambda: not any(row.failures for row in rows), most=20)
    assert num_steps == 2 * len(rows)  # each prefilled alone, and one decode step
    assert len(rows_of(harness.step())) == 4


def test_new_request_is_served_after_a_failed_step_before_the_old_ones_end() -> None:
    harness = Harness(max_rows=4)
    decoding(harness, 3)
    harness.runner.raises_next = True
    harness.step()
    late = harness.add(5, max_tokens=3)
    assert harness.run_until(lambda: late.id not in harness.live) < 15


@pytest.mark.parametrize("chunk_that_fails", [0, 1, 2])
def test_poisoned_prompt_ends_in_error_whichever_chunk_fails(chunk_that_fails: int) -> None:
    harness = Harness(max_rows=3, prefill_step_size=10)
    decoding(harness, 2)
    poisoned = harness.add(30)
    harness.runner.faults[poisoned.id] = lambda row: row.start >= 10 * chunk_that_fails
    harness.run_until(lambda: poisoned.id not in harness.live, most=50)
    assert harness.answer(poisoned).error == "no reason"
    assert harness.runner.num_raised == MAX_FAILURES
    harness.run_to_idle()
    assert [answer.finish_reason for answer in harness.answers.values()] == ["length", "length", "error"]


@pytest.mark.parametrize("place", range(4))
def test_request_that_keeps_failing_in_its_answer_takes_no_other_with_it(place: int) -> None:
    harness = Harness(max_rows=3)
    rows = [harness.add(5, max_tokens=30, depth=3) for _ in range(4)]
    harness.runner.faults[rows[place].id] = lambda row: row.num_drafts > 0
    harness.run_to_idle()
    reasons = [harness.answer(row).finish_reason for row in rows]
    assert reasons.pop(place) == "error"
    assert reasons == ["length"] * 3
    assert harness.runner.num_raised == MAX_FAILURES


def test_several_poisoned_requests_all_end_and_the_others_finish() -> None:
    harness = Harness(max_rows=6)
    rows = [harness.add(5, max_tokens=20, depth=3) for _ in range(8)]
    for row in rows[1::2]:
        harness.runner.faults[row.id] = lambda row: row.is_sampling
    harness.run_to_idle()
    assert [harness.answer(row).finish_reason for row in rows] == ["length", "error"] * 4


def test_device_that_always_fails_ends_every_request() -> None:
    harness = Harness(max_rows=3)
    rows = [harness.add(5) for _ in range(5)]
    for row in rows:
        harness.runner.faults[row.id] = lambda row: True
    harness.run_to_idle(most=20)
    assert {answer.finish_reason for answer in harness.answers.values()} == {"error"}


def test_rows_that_fail_only_in_company_still_finish() -> None:
    harness = Harness(max_rows=3)
    rows = [harness.add(5, max_tokens=20, depth=2) for _ in range(3)]
    harness.runner.faults[rows[1].id] = lambda row: sum(s.failures for s in harness.live.values()) == 0
    harness.run_until(lambda: rows[1].id not in harness.live)
    harness.run_to_idle()
    assert {answer.finish_reason for answer in harness.answers.values()} == {"length"}


def test_preempted_suspect_is_tried_alone_when_it_comes_back() -> None:
    harness, rows = crowded(depth=2)
    harness.run_until(lambda: rows[2].num_generated > 5)
    harness.runner.raises_next = True
    harness.step()
    harness.run_to_idle()  # the harness sees that no suspect runs in company
    assert {answer.finish_reason for answer in harness.answers.values()} == {"length"}


def test_text_that_raises_ends_its_own_request_only(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(max_rows=4)
    rows = [harness.add(5, max_tokens=20, depth=3, raises_at=7 if i == 1 else None) for i in range(4)]
    harness.run_to_idle()
    assert harness.answer(rows[1]).error == "UnicodeError: not a character"
    assert [harness.answer(row).finish_reason for row in rows] == ["length", "error", "length", "length"]
    assert "r1" in caplog.text


def test_drafter_that_raises_ends_its_own_request_only() -> None:
    class BrokenDrafter:
        def propose(self, token_ids: object, num: int) -> Proposal | None:
            raise ZeroDivisionError("no idea")

    harness = Harness(max_rows=2)
    broken, sound = harness.add(5, depth=2, drafter=BrokenDrafter()), harness.add(5, depth=2)
    harness.run_to_idle()
    assert harness.answer(broken).error == "ZeroDivisionError: no idea"
    assert harness.answer(sound).finish_reason == "length"


def test_grammar_that_gets_stuck_ends_its_own_request_only() -> None:
    class StuckGrammar:
        is_restricting = False

        def commit(self, token_id: int) -> None: ...

        def num_allowed(self, drafts: Tokens[int]) -> int:
            return len(drafts)

        def forced(self, most: int) -> list[int]:
            return []

        def masks(self, drafts: Tokens[int]) -> None:
            raise RuntimeError("no token is allowed here")

    harness = Harness(max_rows=2)
    stuck, sound = harness.add(5, depth=2), harness.add(5, depth=2)
    stuck.drafting.grammar = StuckGrammar()
    harness.run_to_idle()
    assert harness.answer(stuck).error == "RuntimeError: no token is allowed here"
    assert harness.answer(sound).finish_reason == "length"


def test_drafter_that_proposes_too_much_is_cut() -> None:
    class EagerDrafter:
        def propose(self, token_ids: object, num: int) -> Proposal:
            return Proposal("ngram", [1] * 50)

    harness = Harness()
    harness.add(5, depth=3, max_tokens=30, drafter=EagerDrafter())
    assert all(row.num_drafts <= 3 for plan in harness.steps(10) for row in rows_of(plan))
    harness.run_to_idle()


def test_result_that_does_not_match_the_plan_commits_nothing() -> None:
    harness = Harness()
    rows = decoding(harness, 3)
    known = [list(row.tokens) for row in rows]
    step = harness.scheduler.plan()
    assert step is not None
    result = harness.runner.run(step.plan)
    for wrong in (result.rows[:2], (), (*result.rows, result.rows[0]), (*result.rows[:2], result.rows[0])):
        step.result = StepResult(wrong)
        with pytest.raises(RuntimeError, match="brought"):
            harness.scheduler.commit(step)
    assert [row.tokens for row in rows] == known
    step.result = result
    harness.take(*harness.scheduler.commit(step))
    harness.run_to_idle()


@pytest.mark.parametrize("corrupt", ["tokens", "slots", "bytes"])
def test_integrity_check_notices_broken_books(corrupt: str) -> None:
    harness = Harness()
    rows = decoding(harness, 2)
    if corrupt == "tokens":
        rows[0].tokens.append(1)
    elif corrupt == "slots":
        rows[0].slot = rows[1].slot
    else:
        harness.scheduler._budget.budget_bytes = 1
    with pytest.raises(AssertionError):
        harness.scheduler.check_integrity()


# -- the fake runner itself ------------------------------------------------------------------------------


def test_fake_runner_notices_a_stale_slot() -> None:
    harness = Harness()
    rows = decoding(harness, 2)
    harness.runner.cells.reverse()
    with pytest.raises(AssertionError, match="another text"):
        harness.step()
    assert len(rows) == 2


def test_fake_runner_raises_after_it_changed_the_caches() -> None:
    harness = Harness()
    harness.add(5)
    harness.runner.raises_next = True
    step = harness.scheduler.plan()
    assert step is not None
    with pytest.raises(StepFailed):
        harness.runner.run(step.plan)
    assert harness.runner.num_bytes > 0


def test_every_accepted_length_occurs() -> None:
    harness = Harness()
    sequence = harness.add(5, max_tokens=500, depth=8)
    strides = set()
    for _ in itertools.takewhile(lambda _: sequence.id in harness.live, range(500)):
        before = sequence.num_generated
        harness.step()
        strides.add(sequence.num_generated - before)
    assert strides == set(range(1, 10))


def test_steps_are_launched_ahead_while_somebody_waits_for_memory() -> None:
    harness = Harness(ahead=1.0, budget_bytes=budget_for(1, 100 + SLACK))
    first, _ = harness.add(20, max_tokens=60), harness.add(20, max_tokens=60)
    harness.run_until(lambda: first.num_generated == 20)
    assert harness.scheduler.num_waiting == 1
    assert harness.num_ahead > 5
    harness.run_to_idle()
