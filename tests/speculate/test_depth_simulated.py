"""The controllers on recorded drafts and on many machines: they never cost, and find the best depths."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from depth_simulator import (
    MACHINES,
    TRACED_MACHINES,
    Outcome,
    Policy,
    Simulation,
    Trace,
    answer_all,
    by_chance,
    constant,
    fixed,
    fixed_zero,
    traces,
)

from outrider.request import MAX_DEPTH
from outrider.speculate.controller import NUM_PROBE_ROWS, PROBE_INTERVAL, DepthController, DraftRequest
from outrider.speculate.costs import CostTable, StepShape
from outrider.speculate.depth import DepthChoice
from outrider.speculate.shapes import FEW_DEPTHS
from patience import case_only_in_soak

KINDS: dict[str, tuple[Trace, ...]] = {
    "chat": traces("chat", False),
    "hot chat": traces("chat", True),
    "code": traces("code", False),
    "hot words": traces("words", True),
    "anything": traces()[::3],
}
SOME_KINDS = ["chat", "code", "hot words"]
NUMS_OF_ROWS = [1, 4, 16]
NUM_STEPS = 160
DEAR_TO_FEED = ("h200", "h200 quantised")  # feeding heads that are never paused takes 3.5 and 4 % of a step


def every_third(*axes: Iterable[Any]) -> list[Any]:
    """All combinations, of which `make test` runs one in three: each value of an axis with others' values."""
    found = []
    for places in itertools.product(*(enumerate(axis) for axis in axes)):
        case = tuple(value for _, value in places)
        is_run = sum(place for place, _ in places) % 3 == 0
        found.append(case if is_run else case_only_in_soak(*case))
    return found


def simulated(machine: str) -> Simulation:
    if machine in MACHINES:
        return Simulation(MACHINES[machine])
    table = TRACED_MACHINES[machine]
    return Simulation(table, DepthController(CostTable(table), few_shapes=True))


def batches(kind: str, num_rows: int) -> list[list[Trace]]:
    """A few batches of that many rows, so that no single text decides."""
    found = KINDS[kind]
    return [[found[(3 * b + i) % len(found)] for i in range(num_rows)] for b in range(max(1, 6 // num_rows))]


def pace(machine: str, kind: str, num_rows: int, policy: Policy | None, with_ngram: bool = False) -> float:
    tokens, seconds = 0, 0.0
    for rows in batches(kind, num_rows):
        simulation = simulated(machine)
        simulation.add(*rows)
        for _, gained, spent in simulation.run(NUM_STEPS, policy, with_ngram).steps:
            tokens, seconds = tokens + gained, seconds + spent
    return tokens / seconds


@functools.cache
def constant_paces(machine: str, kind: str, num_rows: int) -> list[float]:
    policies = [fixed_zero, *(fixed(depth) for depth in range(1, MAX_DEPTH + 1))]
    return [pace(machine, kind, num_rows, policy) for policy in policies]


@pytest.mark.parametrize(("machine", "kind", "num_rows"), every_third(MACHINES, KINDS, NUMS_OF_ROWS))
def test_auto_is_near_the_best_constant_depth_and_never_below_depth_0(
    machine: str, kind: str, num_rows: int
) -> None:
    paces = constant_paces(machine, kind, num_rows)
    auto = pace(machine, kind, num_rows, None)
    assert auto >= (0.95 if machine == "linear" else 0.965) * paces[0]  # no machine is so dear
    # Where each draft is judged, each row needs some steps to know what its drafts bring.
    assert auto >= (0.9 if machine in ("quantised", "default model", "two cores") else 0.94) * max(paces)


@pytest.mark.parametrize(
    ("machine", "percent", "num_rows"), every_third(MACHINES, [30, 50, 70, 85], NUMS_OF_ROWS)
)
def test_auto_hardly_costs_where_drafts_are_right_by_chance(
    machine: str, percent: int, num_rows: int
) -> None:
    """Nothing says anything about such a text. Where drafts just break even, they are tried all the same."""
    tokens, seconds = [0, 0], [0.0, 0.0]
    for seed in range(max(1, 6 // num_rows)):
        rows = [by_chance(percent / 100, 100 * seed + i) for i in range(num_rows)]
        for i, policy in enumerate((None, fixed_zero)):
            simulation = simulated(machine)
            simulation.add(*rows)
            for _, gained, spent in simulation.run(NUM_STEPS, policy).steps:
                tokens[i], seconds[i] = tokens[i] + gained, seconds[i] + spent
    assert tokens[0] / seconds[0] >= 0.95 * tokens[1] / seconds[1]


@pytest.mark.parametrize(
    ("machine", "kind", "num_rows"),
    [
        *every_third([m for m in TRACED_MACHINES if m != "h200 quantised"], SOME_KINDS, NUMS_OF_ROWS),
        *every_third(["h200 quantised"], SOME_KINDS, [1, 8]),
    ],
)
def test_few_depths_are_nearly_as_good_as_all(machine: str, kind: str, num_rows: int) -> None:
    """Where passes are traced, and heads are fed whether they draft or not."""
    paces = constant_paces(machine, kind, num_rows)
    table = TRACED_MACHINES[machine]
    few, steps = DepthController(CostTable(table), few_shapes=True), []
    for rows in batches(kind, num_rows):
        simulation = Simulation(table, few)
        simulation.add(*rows)
        steps += simulation.run(NUM_STEPS).steps
    assert {depth for depths, _, _ in steps for depth in depths} <= set(FEW_DEPTHS)
    pace = sum(tokens for _, tokens, _ in steps) / sum(seconds for _, _, seconds in steps)
    assert pace >= (0.95 if machine in DEAR_TO_FEED else 0.97) * paces[0]
    assert pace >= 0.88 * max(paces)


@pytest.mark.parametrize(
    ("machine", "kind", "num_rows"), every_third(["own products", "quantised"], SOME_KINDS, NUMS_OF_ROWS)
)
def test_lookup_beside_the_head_never_costs(machine: str, kind: str, num_rows: int) -> None:
    alone, both = (pace(machine, kind, num_rows, None, with_ngram) for with_ngram in (False, True))
    assert both >= 0.97 * constant_paces(machine, kind, num_rows)[0]
    assert both >= 0.97 * alone


def test_what_is_known_of_the_machines() -> None:
    """Nothing above says anything unless the best depth differs from machine to machine."""
    best = {
        machine: max(range(MAX_DEPTH + 1), key=constant_paces(machine, "code", 16).__getitem__)
        for machine in MACHINES
    }
    assert best["linear"] == 0 < best["cpu"] < best["flat"]


# -- what changes while it runs ----------------------------------------------------------------------------


def running(machine: str, *rows: Trace, num_steps: int = 64) -> Simulation:
    simulation = simulated(machine)
    simulation.add(*rows)
    simulation.run(num_steps)
    return simulation


def after_change(simulation: Simulation, text: Trace) -> Outcome:
    for row in simulation.rows:
        row.trace = text
    return simulation.run(96)


@pytest.mark.parametrize(
    ("machine", "num_rows"), every_third(["cpu", "quantised", "flat", "gpu", "cliffs"], NUMS_OF_ROWS)
)
def test_depth_comes_back_within_32_steps_when_text_becomes_predictable(machine: str, num_rows: int) -> None:
    simulation = running(machine, *[constant(0)] * num_rows)
    outcome = after_change(simulation, constant(4))
    best = simulated(machine)
    best.add(*[constant(4)] * num_rows)
    # Of 16 rows three are probed at first, and each row goes deeper step by step. Where each draft is judged,
    # two of four rows are probed.
    few = {("quantised", 4): 0.65, ("quantised", 1): 0.85}  # one row was probed at the 29th step
    least = 0.7 if num_rows == 16 else few.get((machine, num_rows), 0.88)
    assert outcome.pace_of(32, 96) >= least * max(best.run(64, fixed(d)).pace for d in range(1, 9))


@pytest.mark.parametrize(("machine", "num_rows"), every_third(list(MACHINES | TRACED_MACHINES), NUMS_OF_ROWS))
def test_depth_goes_within_32_steps_when_text_becomes_unpredictable(machine: str, num_rows: int) -> None:
    simulation = running(machine, *[constant(8)] * num_rows)
    outcome = after_change(simulation, constant(0))
    plain = simulated(machine)
    plain.add(*[constant(0)] * num_rows)
    best = max(plain.run(64, policy).pace for policy in (fixed_zero, *map(fixed, range(1, 9))))
    assert outcome.pace_of(32, 96) >= (0.91 if machine in DEAR_TO_FEED else 0.95) * best


def test_depth_falls_with_the_load_and_comes_back_with_it() -> None:
    simulation = running("cpu", traces("chat", False)[0], traces("chat", False)[1])
    alone = simulation.run(64)
    simulation.add(*(traces("chat", False) * 2)[:14])
    crowded = simulation.run(96)
    assert crowded.mean_depth(32, 96) < 0.2 < alone.mean_depth(0, 64)
    del simulation.rows[2:]
    assert simulation.run(64).mean_depth(32, 64) > 0.5


def test_rows_of_different_worth_go_to_different_depths() -> None:
    """Where a row's part in the head's passes costs, one that gains nothing from them is left out of them."""
    simulation = running("cpu", *[constant(6)] * 12, *[constant(0)] * 4, num_steps=96)
    depths = [each for each, _, _ in simulation.run(32).steps]
    assert sum(sum(each[:12]) for each in depths) > 32 * 12
    assert sum(sum(each[12:]) for each in depths) < 32 * 4 / 4


# -- rows that do not draft, among rows that do -----------------------------------------------------------


@pytest.mark.parametrize(("machine", "num_streams", "num_each"), every_third(MACHINES, [2, 4, 8, 16], [1, 3]))
def test_rows_that_never_draft_do_not_make_a_mixed_round_longer(
    machine: str, num_streams: int, num_each: int
) -> None:
    """They pay for the width of the others, and are the last to end.

    So if nobody asks again, the round is as long as they take, whatever the others gained: then the mean
    answer has to be no later.
    """
    chat, code = traces("chat", False), traces("code", False)
    num = num_streams * num_each
    asked = [((chat, chat, code)[i % 3][i // 3 % 3], i % 3 != 0) for i in range(num)]
    auto, off = (
        answer_all(Simulation(MACHINES[machine]), asked, num_streams, 96, policy)
        for policy in (None, fixed_zero)
    )
    assert off[1] >= 0.97 * auto[1]  # the mean answer
    if num_each > 1:
        assert off[0] >= 0.965 * auto[0]  # until the last answer


def test_a_plain_row_may_wait_a_little_where_the_others_gain_much() -> None:
    simulation = Simulation(MACHINES["cpu"])
    simulation.add(constant(0), drafts=False)
    simulation.add(*[constant(6)] * 7)
    assert simulation.run(64).mean_depth(32, 64) > 1
    crowd = Simulation(MACHINES["cpu"])
    crowd.add(*[constant(0)] * 7, drafts=False)
    crowd.add(constant(6))
    assert crowd.run(64).mean_depth(0, 64) == 0


def test_while_no_row_drafts_the_head_hardly_ever_runs() -> None:
    simulation = running("cpu", *[constant(0)] * 16, num_steps=128)
    plain = simulation.truth.step_s
    outcome = simulation.run(64)
    assert all(not any(each) for each, _, _ in outcome.steps)
    assert 64 / outcome.pace_of(0, 64) * 16 / 64 <= 1.02 * plain(StepShape(16, 1))


def rows_drafted_for(simulation: Simulation) -> list[int]:
    """A list that grows by one number a step: the rows for which the head drafts."""
    counts: list[int] = []
    whole = simulation.controller.choose

    def choose(requests: Sequence[DraftRequest], num_cells: int) -> DepthChoice:
        found = whole(requests, num_cells)
        counts.append(sum(depth > 0 for depth in found.num_drafts_next))
        return found

    simulation.controller.choose = choose  # type: ignore[method-assign]
    return counts


def test_while_no_row_drafts_rows_are_probed_in_the_same_step_whenever_they_came() -> None:
    """A step with a probe takes longer, however few rows are probed."""
    simulation = Simulation(MACHINES["two threads"])
    probed = rows_drafted_for(simulation)
    for _ in range(8):
        simulation.add(constant(0))
        simulation.run(5)
    simulation.run(24)
    del probed[:]
    simulation.run(96)
    assert set(probed) == {0, NUM_PROBE_ROWS}
    assert probed.count(NUM_PROBE_ROWS) <= 96 / PROBE_INTERVAL + 1


def test_padding_is_used_where_it_is_cheaper() -> None:
    """One row on a machine where 8 tokens cost what 1 does and 4 cost three times that."""
    simulation = running("cliffs", constant(3), num_steps=64)
    assert simulation.controller.shapes.decode_shape(1, 4, 128, 1) == (1, 8)
    assert simulation.run(32).mean_depth(0, 32) >= 3
