"""What the choice of depths must always keep to, whatever the costs and the chances."""

from __future__ import annotations

import sys
from typing import Any

import hypothesis.strategies as st
import pytest
from depth_simulator import WIDTHS
from hypothesis import given, settings

from outrider.request import MAX_DEPTH, SamplingParams
from outrider.speculate.acceptance import ModelAcceptance, RowAcceptance, Source
from outrider.speculate.controller import DepthController, DraftRequest, Offer
from outrider.speculate.costs import CostTable, HeadCost, MeasuredCosts
from outrider.speculate.depth import RowForecast, best_depth, choose

seconds = st.floats(1e-4, 10.0)
sources = st.sampled_from(["head", "ngram", "prediction", "forced"])


@st.composite
def tables(draw: st.DrawFn) -> MeasuredCosts:
    counts = [1, *draw(st.sets(st.integers(2, 32), max_size=3))]
    widths = [1, 2, *draw(st.sets(st.sampled_from(WIDTHS[2:])))]
    trunk = {(rows, width): draw(seconds) for rows in counts for width in widths}
    head = {rows: HeadCost(draw(seconds), draw(seconds), draw(seconds)) for rows in counts}
    return MeasuredCosts(trunk, head if draw(st.booleans()) else {}, 128, draw(st.floats(0, 1e-3)))


@st.composite
def row_specs(draw: st.DrawFn) -> dict[str, Any]:
    fixed = draw(st.none() | st.integers(0, MAX_DEPTH))
    most = MAX_DEPTH if fixed is None else fixed
    offers = draw(st.lists(st.tuples(sources, st.integers(1, max(1, most))), max_size=3)) if most else []
    return {
        "offers": [Offer(source, num, num if source == "forced" else 0) for source, num in offers],
        "fixed_depth": fixed,
        "max_drafts_next": draw(st.integers(0, most)),
        "head_lag": draw(st.integers(0, 600)),
        "joins": draw(st.booleans()) and not offers,
        "fate": draw(st.integers(0, 8)),
        "temperature": draw(st.sampled_from([0.0, 0.3, 0.8, 2.0])),
    }


def requests_of(specs: list[dict[str, Any]], records: list[RowAcceptance]) -> list[DraftRequest]:
    names = ("offers", "fixed_depth", "max_drafts_next", "head_lag", "joins")
    return [
        DraftRequest(record, **{k: spec[k] for k in names})
        for spec, record in zip(specs, records, strict=True)
    ]


def play(
    table: MeasuredCosts, specs: list[dict[str, Any]], num_steps: int
) -> tuple[list[Any], DepthController]:
    controller = DepthController(CostTable(table))
    records = [controller.new_record(SamplingParams(temperature=spec["temperature"])) for spec in specs]
    choices = []
    for _ in range(num_steps):
        choice = controller.choose(requests_of(specs, records), 200)
        choices.append(choice)
        for spec, record in zip(specs, records, strict=True):
            for source, num, *_ in spec["offers"]:
                record.add(source, num, min(num, spec["fate"]), 1 + spec["fate"])
    return choices, controller


@settings(max_examples=150, deadline=None)
@given(tables(), st.lists(row_specs(), min_size=1, max_size=8))
def test_depths_keep_within_what_is_offered_asked_and_left(
    table: MeasuredCosts, specs: list[dict[str, Any]]
) -> None:
    choices, _ = play(table, specs, 12)
    for choice in choices:
        assert len(choice.feed) == len(choice.num_drafts_next) == len(specs)
        for spec, (which, num), wanted in zip(specs, choice.feed, choice.num_drafts_next, strict=True):
            offered = [offer.num_drafts for offer in spec["offers"]]
            assert 0 <= num <= (offered[which] if offered else 0) <= MAX_DEPTH
            assert 0 <= wanted <= spec["max_drafts_next"]
            if spec["fixed_depth"] is not None:
                assert num == (min(spec["fixed_depth"], offered[which]) if offered else 0)
                assert wanted == min(spec["fixed_depth"], spec["max_drafts_next"])


@settings(max_examples=50, deadline=None)
@given(tables(), st.lists(row_specs(), min_size=1, max_size=6))
def test_same_history_gives_the_same_depths(table: MeasuredCosts, specs: list[dict[str, Any]]) -> None:
    assert play(table, specs, 20)[0] == play(table, specs, 20)[0]


def test_nothing_grows_with_time() -> None:
    table = CostTable(
        MeasuredCosts({(1, 1): 1.0, (1, 2): 1.2, (8, 1): 2.0, (8, 2): 3.0}, {1: HeadCost(0.1, 0.1, 0.1)})
    )
    spec = {
        "offers": [Offer("head", 4)],
        "fixed_depth": None,
        "max_drafts_next": 8,
        "head_lag": 0,
        "joins": False,
    }
    specs = [{**spec, "fate": i % 4, "temperature": 0.0} for i in range(8)]
    controller = DepthController(table)
    records = [controller.new_record(SamplingParams(temperature=0)) for _ in specs]

    def size(thing: object, seen: set[int]) -> int:
        if id(thing) in seen:
            return 0
        seen.add(id(thing))
        parts = (
            list(thing.items())
            if isinstance(thing, dict)
            else list(thing)
            if isinstance(thing, (list, tuple))
            else []
        )
        parts += [vars(thing)] if hasattr(thing, "__dict__") else []
        return sys.getsizeof(thing) + sum(size(part, seen) for part in parts)

    def run(num_steps: int) -> None:
        for step in range(num_steps):
            controller.choose(requests_of(specs, records), 200)
            for spec, record in zip(specs, records, strict=True):
                record.add("head", 4, spec["fate"], 1 + spec["fate"])
            from outrider.speculate.costs import StepShape

            controller.costs.observe(StepShape(1 + step % 8, 1 + step % 9, 1, 1), 1.0)

    run(200)
    before = size([controller, records], set())
    run(2000)
    assert size([controller, records], set()) <= before + 500


def test_a_width_that_someone_pays_is_free_for_the_others() -> None:
    """One row insists on 3 drafts; the others ride along although alone they would not."""

    def cost(width: int, depth: int) -> float:
        return float(width)

    weak = RowForecast(offers=[[0.3, 0.1, 0.05]], head_chances=[0.3, 0.1, 0.05])
    alone = choose([weak, weak], cost, cost, lambda depth: 0.0)
    assert [num for _, num in alone.feed] == [0, 0]
    insists = RowForecast(offers=[[0.3, 0.1, 0.05]], fixed_depth=3, head_chances=[0.3, 0.1, 0.05])
    together = choose([insists, weak], cost, cost, lambda depth: 0.0)
    assert [num for _, num in together.feed] == [3, 3]
    assert together.num_drafts_next == (3, 3)


def test_the_best_offer_is_fed() -> None:
    row = RowForecast(offers=[[0.5, 0.2], [0.9, 0.8, 0.7], [1.0]])
    choice = choose(
        [row], lambda width, depth: 1 + 0.1 * width, lambda width, depth: 1 + 0.1 * width, lambda d: 0.0
    )
    assert choice.feed == ((1, 3),)


def test_a_cliff_is_climbed_where_the_other_side_is_better() -> None:
    costs = {1: 0.65, 2: 1.14, 3: 1.43, 4: 1.92, 5: 1.92, 6: 1.92, 7: 1.92, 8: 0.71, 9: 0.71}
    row = RowForecast(head_chances=[0.8**j for j in range(1, 9)])
    best = best_depth([row], lambda width, depth: costs[width] + 0.02 * depth)
    assert best.depth >= 7


@pytest.mark.parametrize(("gain", "min_gain", "depth"), [(1.02, 1.0, 2), (1.02, 1.05, 1), (1.1, 1.05, 2)])
def test_a_depth_stays_unless_another_promises_enough_more(gain: float, min_gain: float, depth: int) -> None:
    """Depth 2 promises `gain` times what depth 1 does, at which the row drafts now."""
    chances = [0.8, 0.7]
    waits = {0: 1.0, 1: 1 / 1.8 * 1.5, 2: 1 / 1.8 * 1.5 / gain}
    tokens = {0: 1.0, 1: 1.8, 2: 2.5}
    row = RowForecast(head_chances=chances, last_depth=1)

    def cost(width: int, made: int) -> float:
        return waits[made] * tokens[made]

    assert best_depth([row], cost, (0, 1, 2), min_gain).depth == depth


def test_a_depth_that_no_longer_pays_is_left_at_once() -> None:
    row = RowForecast(head_chances=[0.1, 0.01], last_depth=2)
    assert best_depth([row], lambda width, made: float(width), (0, 1, 2), 1.05).depth == 0


def test_drafts_that_were_not_fed_are_learnt_from_too() -> None:
    model = ModelAcceptance()
    record = RowAcceptance(model, SamplingParams(temperature=0))
    before = record.chances("head", 1)[0]
    for _ in range(5):
        record.compare("head", [4, 5, 6], [4])  # a plain step brought the first draft
    assert record.chances("head", 1)[0] > before + 0.15
    for _ in range(20):
        record.compare("head", [4, 5, 6], [9])
    assert record.chances("head", 1)[0] < 0.2


def test_new_rows_start_from_what_others_of_their_temperature_showed() -> None:
    model = ModelAcceptance()
    cold, hot = SamplingParams(temperature=0), SamplingParams(temperature=0.8)
    source: Source = "head"
    for _ in range(100):
        RowAcceptance(model, cold).add(source, 2, 2, 3)
        RowAcceptance(model, hot).add(source, 2, 0, 1)
    assert RowAcceptance(model, cold).chances(source, 1)[0] > 0.9
    assert RowAcceptance(model, hot).chances(source, 1)[0] < 0.15
    again = ModelAcceptance.from_json(model.as_json())
    assert again.as_json() == model.as_json()
    assert RowAcceptance(again, cold).chances(source, 1)[0] > 0.9
