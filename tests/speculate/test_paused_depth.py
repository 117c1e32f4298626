"""A head that drafts for no row: when this is decided again, and how often rows are probed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from depth_simulator import choice_of_step

from outrider.request import SamplingParams
from outrider.speculate.controller import DraftRequest, Offer
from outrider.speculate.costs import CostTable, HeadCost, guessed_costs
from outrider.speculate.depth import DepthChoice
from outrider.speculate.per_draft import LOOKUP_INTERVAL, NUM_PROBE_ROWS, PROBE_INTERVAL, PerDraftController


class CountingController(PerDraftController):
    """Counts how often it decides whether the head drafts."""

    num_decisions = 0

    def _next_drafts(self, *args: Any) -> tuple[int, list[int]]:
        self.num_decisions += 1
        return super()._next_drafts(*args)


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> CountingController:
    """One whose head never promises enough."""
    monkeypatch.setattr(PerDraftController, "_waits", lambda *_: iter(()))
    return CountingController()


def requests_of(controller: PerDraftController, num: int) -> list[DraftRequest]:
    params = SamplingParams(temperature=0)
    return [DraftRequest(controller.new_record(params), (), None, 8) for _ in range(num)]


def chosen(controller: PerDraftController, requests: Sequence[DraftRequest]) -> DepthChoice:
    return choice_of_step(controller, requests, 100)


def num_next(controller: PerDraftController, requests: Sequence[DraftRequest]) -> tuple[int, ...]:
    return chosen(controller, requests).num_drafts_next


def test_a_paused_head_stays_paused_until_rows_change_or_drafts_come(controller: CountingController) -> None:
    rows = requests_of(controller, 3)
    for _ in range(5):
        assert num_next(controller, rows) == (0, 0, 0)
    assert controller.num_decisions == 1
    joining = DraftRequest(controller.new_record(SamplingParams()), (), None, 8, joins=True)
    num_next(controller, [*rows, joining])
    assert controller.num_decisions == 2, "a row joins"
    decoding = DraftRequest(joining.record, (), None, 8)
    num_next(controller, [*rows, decoding])
    assert controller.num_decisions == 3, "it decodes from now on"
    num_next(controller, [*rows, decoding])
    assert controller.num_decisions == 3
    probed = DraftRequest(rows[0].record, [Offer("head", 1, confidence=(5.0,))], None, 8)
    num_next(controller, [probed, *rows[1:], decoding])
    assert controller.num_decisions == 4, "a probe tells more"
    num_next(controller, rows)
    assert controller.num_decisions == 5, "a row has left"


def test_lookups_that_cannot_pay_are_no_reason_to_decide_again(controller: CountingController) -> None:
    first, *others = requests_of(controller, 3)
    lookup = DraftRequest(first.record, [Offer("ngram", 8)], None, 8)
    num_next(controller, [first, *others])
    for _ in range(200):
        first.record.add("ngram", 8, 0, 1)
    assert chosen(controller, [lookup, *others]).feed == ((0, 0),) * 3
    assert controller.num_decisions == 1
    for _ in range(200):
        first.record.add("ngram", 8, 8, 9)
    assert chosen(controller, [lookup, *others]).feed[0][1] > 0
    assert controller.num_decisions == 2


def test_certain_drafts_are_fed_beside_a_paused_head(controller: CountingController) -> None:
    first, *others = requests_of(controller, 3)
    num_next(controller, [first, *others])
    forced = DraftRequest(first.record, [Offer("forced", 3, 3)], None, 8)
    assert chosen(controller, [forced, *others]).feed[0] == (0, 3)


def test_rows_of_a_fixed_depth_draft_beside_a_paused_head(controller: CountingController) -> None:
    record = controller.new_record(SamplingParams(temperature=0))
    rows = [*requests_of(controller, 2), DraftRequest(record, (), 3, 2)]
    for _ in range(3):
        assert num_next(controller, rows) == (0, 0, 2)


def test_probes_are_few_rows_and_rare(controller: CountingController) -> None:
    rows = requests_of(controller, 6)
    probes = [sum(num_next(controller, rows)) for _ in range(4 * PROBE_INTERVAL)]
    assert set(probes) == {0, NUM_PROBE_ROWS}
    assert 3 <= sum(map(bool, probes)) <= 4


# Drafts of one row cost nothing, those of eight nearly as much as tokens.
DEAR_IN_MANY_ROWS = replace(
    guessed_costs(),
    trunk_s={(1, 1): 1.0, (1, 9): 1.0, (8, 1): 2.0, (8, 9): 16.0},
    padding_share=0.0,
    missed_cell_s=0.05,
)


def test_the_head_makes_drafts_for_the_rows_of_the_next_step() -> None:
    controller = PerDraftController(CostTable(DEAR_IN_MANY_ROWS))
    (decoding,) = requests_of(controller, 1)
    joining = [replace(request, joins=True) for request in requests_of(controller, 7)]
    assert num_next(controller, [decoding])[0] > 0
    assert num_next(controller, joining[:1])[0] > 0
    assert num_next(controller, joining) == (0,) * 7
    assert num_next(controller, [decoding, *joining]) == (0,) * 8


def each_token_costs(num: float) -> CostTable:
    """A step of 10, and so much for each token. The head costs nothing."""
    measured = guessed_costs()
    trunk_s = {(rows, width): 10 + num * rows * width for rows, width in measured.trunk_s}
    head = {1: HeadCost(0.0, 0.0, 0.0)}
    return CostTable(replace(measured, trunk_s=trunk_s, head=head, padding_share=0.0))


def test_drafts_of_the_next_step_are_priced_by_its_rows() -> None:
    """Among sixteen rows they have to bring twice their cost."""
    controller = PerDraftController(each_token_costs(0.6))
    decoding = requests_of(controller, 8)
    joining = [replace(request, joins=True) for request in requests_of(controller, 8)]
    assert all(num_next(controller, decoding))
    assert num_next(controller, [*decoding, *joining]) == (0,) * 16


@pytest.mark.parametrize(("num_ending", "drafts"), [(0, True), (5, False)])
def test_rows_that_are_about_to_end_wait_for_the_drafts_of_others(num_ending: int, drafts: bool) -> None:
    controller = PerDraftController(each_token_costs(0.6))
    rows = requests_of(controller, 1 + num_ending)
    rows[1:] = [replace(request, max_drafts_next=0, num_left=2) for request in rows[1:]]
    assert (num_next(controller, rows)[0] > 0) == drafts


@pytest.mark.parametrize(
    ("num_missed", "num_left", "drafts"), [(0, 9, True), (800, 9, False), (800, 900, True)]
)
def test_a_head_that_has_missed_much_has_to_bring_more(num_missed: int, num_left: int, drafts: bool) -> None:
    controller = PerDraftController(CostTable(DEAR_IN_MANY_ROWS))
    (request,) = requests_of(controller, 1)
    late = replace(request, head_lag=num_missed, num_left=num_left)
    assert (num_next(controller, [late])[0] > 0) == drafts


def costly_drafts() -> CountingController:
    """A controller for which a draft of one of many rows costs more than a token is worth."""
    measured = guessed_costs()
    trunk_s = {(rows, width): 1.0 + (rows * width) ** 1.5 for rows, width in measured.trunk_s}
    return CountingController(CostTable(replace(measured, trunk_s=trunk_s, padding_share=0.0)))


def test_nothing_is_probed_or_looked_up_while_no_draft_can_pay() -> None:
    controller = costly_drafts()
    rows = requests_of(controller, 8)
    for _ in range(4 * PROBE_INTERVAL):
        assert num_next(controller, rows) == (0,) * 8
        assert not controller.drafts_may_pay


@pytest.mark.parametrize("num_steps", [1, 3 * PROBE_INTERVAL, 3 * PROBE_INTERVAL + 7])
def test_with_few_rows_left_the_head_drafts_again(num_steps: int) -> None:
    controller = costly_drafts()
    rows = requests_of(controller, 8)
    for _ in range(num_steps):
        num_next(controller, rows)
    assert not controller.drafts_may_pay
    controller.costs = CostTable(guessed_costs(), in_seconds=False)
    assert num_next(controller, rows[:1])[0] > 0, "what the head brings is known by the price of drafts now"
    assert controller.drafts_may_pay


@pytest.mark.parametrize("num_steps", [1, 3 * PROBE_INTERVAL, 3 * PROBE_INTERVAL + 7])
def test_costs_are_looked_at_again_while_no_draft_can_pay(num_steps: int) -> None:
    controller = costly_drafts()
    rows = requests_of(controller, 8)
    for _ in range(num_steps):
        num_next(controller, rows)
    controller.costs = CostTable(guessed_costs(), in_seconds=False)
    assert any(any(num_next(controller, rows)) for _ in range(PROBE_INTERVAL + 1))
    assert controller.drafts_may_pay


def test_costs_are_not_looked_at_in_every_step() -> None:
    controller = costly_drafts()
    rows = requests_of(controller, 8)
    for _ in range(10 * PROBE_INTERVAL):
        num_next(controller, rows)
    assert 9 <= controller.num_decisions <= 11


@pytest.mark.parametrize(("num_rows", "share"), [(1, 1.0), (6, 1 / LOOKUP_INTERVAL), (8, 0.0)])
def test_among_many_rows_lookups_are_rare(num_rows: int, share: float) -> None:
    """Among six only long matches pay, among eight none."""
    measured = guessed_costs()
    trunk_s = {(rows, width): 1.0 + 0.12 * (rows * width - 1) for rows, width in measured.trunk_s}
    costs = CostTable(replace(measured, trunk_s=trunk_s, padding_share=0.0))
    controller = CountingController(costs)
    rows = requests_of(controller, num_rows)
    for row in rows:
        row.record.add("head", 1, 0, 1, confidence=(0.1,))
    asked = 0
    for _ in range(400):
        row = rows[0].record
        row.add("head", 1, 0, 1, confidence=(9.0,))  # heads are never right
        num_next(controller, rows)
        asked += controller.asks_host_drafters(row)
    assert asked / 400 == pytest.approx(share, abs=0.05)


def test_rows_that_join_change_nothing_while_not_even_a_certain_draft_can_pay() -> None:
    controller = costly_drafts()
    rows = requests_of(controller, 8)
    num_next(controller, rows)
    for _ in range(4):
        (joining,) = requests_of(controller, 1)
        assert num_next(controller, [*rows, replace(joining, joins=True)]) == (0,) * (len(rows) + 1)
        rows.append(joining)
        assert num_next(controller, rows) == (0,) * len(rows)
    assert controller.num_decisions == 1
    num_next(controller, rows[1:])
    assert controller.num_decisions == 2, "a row has left"


def test_rows_with_short_answers_are_probed_too(controller: CountingController) -> None:
    num_probes = 0
    for _ in range(60):
        rows = requests_of(controller, 3)  # of answers of 10 tokens
        num_probes += sum(sum(num_next(controller, rows)) > 0 for _ in range(10))
    assert 1 <= num_probes <= 3
