"""Rows, controller and scheduler together, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from fake_runner import VOCAB_SIZE, true_next
from scheduler_harness import Harness

from outrider.engine import draft_planner
from outrider.plan import CacheGeometry, RowPlan, StepPlan
from outrider.speculate.acceptance import RowAcceptance
from outrider.speculate.controller import DepthController, DraftRequest
from outrider.speculate.costs import CostTable, HeadCost, MeasuredCosts, StepShape
from outrider.speculate.depth import DepthChoice
from outrider.speculate.drafter import Proposal
from outrider.speculate.per_draft import PerDraftController
from run_steps import run_step

CHEAP = MeasuredCosts(
    {(1, 1): 1.0, (1, 9): 1.01, (64, 1): 1.0, (64, 9): 1.01}, {1: HeadCost(0.001, 0.001, 0.001)}
)
DEAR = MeasuredCosts({(1, 1): 1.0, (1, 9): 9.0, (64, 1): 64.0, (64, 9): 576.0}, {1: HeadCost(0.1, 0.1, 0.1)})


class ScriptedController(DepthController):
    """Feeds everything and wants the head's drafts in some steps only."""

    def __init__(self, wants: list[int]) -> None:
        super().__init__()
        self._wants = wants

    def choose(self, wishes: list[DraftRequest], num_cells: int, num_slots: int = 0) -> DepthChoice:  # type: ignore[override]
        wanted = self._wants.pop(0) if self._wants else 0
        feed = tuple((0, wish.offers[0][1] if wish.offers else 0) for wish in wishes)
        return DepthChoice(feed, tuple(min(wanted, wish.max_drafts_next) for wish in wishes))


def decode_rows(plan: StepPlan | None) -> list[RowPlan]:
    assert plan is not None
    return [row for batch in plan.batches for row in batch if row.start >= row.num_prompt]


def auto_rows(harness: Harness, num: int, max_tokens: int = 60) -> None:
    for _ in range(num):
        harness.add(4, max_tokens=max_tokens, depth=8, is_auto=True)


def test_auto_rows_draft_where_it_is_cheap_and_explicit_rows_as_they_asked() -> None:
    harness = Harness(controller=DepthController(CostTable(CHEAP)))
    auto_rows(harness, 2)
    explicit = harness.add(4, max_tokens=60, depth=2)
    plain = harness.add(4, max_tokens=60, depth=0)
    depths: dict[int, set[int]] = {}
    for plan in harness.steps(12):
        for row in decode_rows(plan):
            depths.setdefault(row.sequence_id, set()).add(row.num_drafts)
    assert max(depths[0]) > 2
    assert depths[explicit.id] <= {0, 2}
    assert depths[plain.id] == {0}
    harness.run_to_idle()


def test_auto_rows_do_not_draft_where_it_cannot_pay_and_their_head_rests() -> None:
    harness = Harness(controller=DepthController(CostTable(DEAR)))
    auto_rows(harness, 3)
    rows = [row for plan in harness.steps(12) for row in decode_rows(plan)]
    assert all(row.num_drafts == 0 and row.defers_head and not row.feeds_head for row in rows)
    harness.run_to_idle()


class SeeingController(PerDraftController):
    """Notes for how many rows it decides, and how many of them prefill."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def choose(self, requests: Sequence[DraftRequest], num_cells: int, num_slots: int = 0) -> DepthChoice:
        self.seen.append((len(requests), sum(request.joins for request in requests)))
        return super().choose(requests, num_cells, num_slots)


def test_drafts_are_decided_for_the_rows_that_wait_for_their_turn_too() -> None:
    """One row computes the prompt that three others share. Meanwhile one row decodes."""
    controller = SeeingController()
    harness = Harness(
        max_rows=5, prefill_step_size=64, prefix_bytes=10**6, min_loaded_cells=4, controller=controller
    )
    running = harness.add(3, max_tokens=60, depth=8, is_auto=True)
    harness.run_until(lambda: running.is_decoding)
    for i in range(4):
        harness.add([*range(40), i], max_tokens=30, depth=8, is_auto=True)
    controller.seen.clear()
    harness.run_until(lambda: all(row.is_decoding for row in harness.live.values()))
    assert controller.seen == [(5, 4), (5, 3)]
    harness.run_to_idle()


def test_a_head_is_not_fed_the_end_of_a_prompt_if_no_draft_is_wanted() -> None:
    harness = Harness(controller=ScriptedController([0, 0, 2, 2]))
    auto_rows(harness, 2)
    first, *others = harness.steps(6)
    assert first is not None
    assert all(row.defers_head for batch in first.batches for row in batch)
    assert any(row.head_lag > 4 and row.feeds_head for plan in others for row in decode_rows(plan))
    harness.run_to_idle()


def test_a_head_comes_back_after_a_rest_with_all_that_it_missed() -> None:
    """The fake runner checks that the head has the whole text when it drafts."""
    harness = Harness(controller=ScriptedController([2, 2, 0, 0, 0, 0, 3, 3, 0, 0, 1]))
    auto_rows(harness, 2, max_tokens=30)
    behind = [max(row.head_lag for row in decode_rows(plan)) for plan in harness.steps(12)[1:]]
    assert max(behind) >= 3
    harness.run_to_idle()


def test_heads_that_come_back_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_planner, "MAX_CATCH_UP", 12)
    harness = Harness(controller=ScriptedController([0] * 10 + [2] * 6))
    auto_rows(harness, 4)
    caught = []
    for plan in harness.steps(15):
        caught.append(sum(row.feeds_head and row.head_lag > 0 for row in decode_rows(plan)))
    assert [num for num in caught if num] == [1, 1, 1, 1]
    harness.run_to_idle()


def test_times_of_decode_steps_reach_the_table_and_of_others_do_not() -> None:
    seen: list[StepShape] = []

    class Watching(CostTable):
        def observe(self, shape: StepShape, seconds: float, host_s: float | None = None) -> None:
            seen.append(shape)

    roomy = CacheGeometry(bytes_per_cell=1, capacity_step=256)
    harness = Harness(geometry=roomy, controller=DepthController(Watching(CHEAP)))
    auto_rows(harness, 2, max_tokens=40)
    for step in range(9):
        if step == 5:
            harness.add(4, max_tokens=4)  # a prompt runs beside the others
        planned = harness.scheduler.plan()
        assert planned is not None
        plan, num_seen = planned.plan, len(seen)
        harness.take(*run_step(harness.scheduler, harness.runner, planned, seconds=0.5))
        only_decoded = len(decode_rows(plan)) == sum(map(len, plan.batches))
        if len(seen) > num_seen:
            assert only_decoded
            assert (seen[-1].rows, seen[-1].width) == (len(plan.batches[0]), plan.shapes[0].width)
        elif only_decoded:
            assert plan.moves or step == 6  # the caches grew
    assert len(seen) >= 5


@pytest.mark.parametrize(("host_share", "is_worth_it"), [(0.0, True), (0.9, False)])
def test_a_lookup_is_waited_for_where_it_brings_more_than_that_costs(
    host_share: float, is_worth_it: bool
) -> None:
    """What it finds is right now and then, and what the head drafts never is."""
    controller = DepthController(CostTable(CHEAP))
    harness = Harness(max_rows=2, ahead=1.0, controller=controller)
    harness.runner._drafts = lambda row, known: [VOCAB_SIZE] * row.num_drafts_next  # type: ignore[method-assign]
    for _ in range(2):
        harness.add(4, max_tokens=200, depth=8, is_auto=True).drafting.lookup = HalfKnowing()
    harness.steps(30)
    controller.costs.host_share = host_share
    controller.costs.observe = lambda *_: None  # type: ignore[method-assign]
    before = harness.num_ahead
    drafted = [row.num_drafts for plan in harness.steps(20) for row in decode_rows(plan)]
    if is_worth_it:
        assert harness.num_ahead - before <= 2
        assert max(drafted) == 1
    else:
        assert harness.num_ahead - before >= 8
        assert any(record.other_share > 0.5 for record in _records(harness))  # what it would find is known


@pytest.mark.parametrize(
    ("costs", "is_auto", "is_asked"), [(DEAR, True, False), (DEAR, False, True), (CHEAP, True, True)]
)
def test_nothing_is_looked_up_for_rows_on_auto_while_no_draft_can_pay(
    costs: MeasuredCosts, is_auto: bool, is_asked: bool
) -> None:
    harness = Harness(controller=PerDraftController(CostTable(replace(costs, padding_share=0.0))))
    lookup = CountingLookup()
    for _ in range(3):
        harness.add(4, max_tokens=60, depth=2, is_auto=is_auto).drafting.lookup = lookup
    harness.steps(20)
    assert (
        lookup.num_asked >= 15 if is_asked else lookup.num_asked <= 6
    )  # at first the costs are not looked at
    harness.run_to_idle()


class CountingLookup:
    num_asked = 0

    def propose(self, token_ids: Sequence[int], num: int) -> Proposal | None:
        self.num_asked += 1
        return None


class HalfKnowing:
    def propose(self, token_ids: Sequence[int], num: int) -> Proposal | None:
        drafts = [true_next(token_ids) if len(token_ids) % 3 == 0 else VOCAB_SIZE][:num]
        return Proposal("ngram", drafts) if drafts else None


def _records(harness: Harness) -> list[RowAcceptance]:
    rows = harness.scheduler._running
    return [row.drafting.acceptance for row in rows if row.drafting.acceptance is not None]


@pytest.mark.parametrize("num_rows", [3, 8])
def test_steps_are_launched_ahead_while_the_heads_of_many_rows_rest(num_rows: int) -> None:
    """Of many rows only a few are tried: the others, long untried, must not hold steps up."""
    harness = Harness(max_rows=num_rows, ahead=1.0, controller=DepthController())
    harness.runner._drafts = lambda row, known: [VOCAB_SIZE] * row.num_drafts_next  # type: ignore[method-assign]
    auto_rows(harness, num_rows, max_tokens=200)
    harness.steps(60)
    before = harness.num_ahead
    rows = [row for plan in harness.steps(40) for row in decode_rows(plan)]
    assert sum(row.defers_head for row in rows) > len(rows) / 2
    assert harness.num_ahead - before > 15


def test_a_draft_model_stops_where_its_context_ends() -> None:
    """The row goes on without drafts, and is not fed to the draft model past its last position."""
    harness = Harness(controller=DepthController(CostTable(CHEAP)))
    row = harness.add(20, max_tokens=60, depth=3)
    row.drafting.head_context = limit = 50
    plans = harness.steps(60)
    fed = [planned for plan in plans for batch in plan.batches for planned in batch]
    assert any(planned.num_drafts for planned in fed)
    assert fed[-1].start > limit
    for planned in fed:
        if planned.feeds_head:
            assert planned.start + planned.num_fed + planned.num_drafts_next < limit
        else:
            assert planned.num_drafts_next == 0
            assert planned.defers_head
    harness.run_to_idle()
