"""Costs by tokens: a line through measurements of which some are wrong."""

from __future__ import annotations

import math
import random
import tracemalloc

import pytest
from depth_simulator import MACHINES

from outrider.speculate.costs import CostTable, HeadCost, MeasuredCosts, StepShape
from outrider.speculate.token_costs import TokenCosts, near_line

# SmolLM2-135M in 4 bits on two cores, milliseconds by width, on a quiet machine and beside another process.
QUIET = {
    1: (4.03, 4.26, 5.12, 5.53, 6.51, 7.35, 8.18, 8.98, 10.14),
    2: (4.88, 5.51, 7.19, 8.76, 10.84, 12.76, 14.77, 16.22, 18.43),
    4: (6.12, 8.97, 12.4, 16.08, 20.45, 23.87, 27.21, 34.38, 34.38),
    8: (9.67, 19.73, 24.0, 30.5, 40.01, 46.55, 53.42, 59.57, 70.25),
    16: (17.39, 31.52, 46.29, 60.79, 77.26, 90.47, 105.24, 121.08, 135.07),
}
BUSY = {
    1: (6.33, 6.7, 6.7, 8.65, 8.65, 9.46, 10.33, 11.26, 12.5),
    2: (6.33, 7.78, 7.78, 10.92, 13.71, 13.71, 15.6, 17.49, 19.66),
    4: (11.94, 15.45, 15.45, 27.14, 27.14, 32.31, 36.82, 40.41, 42.08),
    8: (11.94, 18.09, 24.76, 32.77, 44.94, 50.82, 57.42, 62.42, 79.26),
    16: (43.48, 60.52, 60.52, 90.14, 90.14, 101.42, 107.32, 126.79, 174.77),
}


def by_shape(table: dict[int, tuple[float, ...]]) -> dict[tuple[int, int], float]:
    return {(rows, width): ms for rows, each in table.items() for width, ms in enumerate(each, 1)}


def measured(trunk_s: dict[tuple[int, int], float]) -> MeasuredCosts:
    return MeasuredCosts(trunk_s, {1: HeadCost(0.1, 0.4, 0.5)}, padding_share=0.0, by_tokens=True)


@pytest.mark.parametrize("machine", ["cpu", "own products", "quantised"])
def test_measurements_of_cpus_lie_on_the_line(machine: str) -> None:
    trunk_s = MACHINES[machine].trunk_s
    costs = TokenCosts(trunk_s)
    for shape, seconds in trunk_s.items():
        assert costs.step_s(*shape) == pytest.approx(seconds, rel=0.1)
    assert costs.step_s(1, 1) == pytest.approx(trunk_s[1, 1], rel=0.02)


def test_a_busy_machine_s_measurements_tell_what_a_quiet_one_s_do() -> None:
    """In plain steps of one row: single shapes were wrong by up to 1.6."""
    quiet, busy = (TokenCosts(by_shape(table)) for table in (QUIET, BUSY))
    worst = 0.0
    for shape in ((2, 1), (4, 1), (4, 2), (8, 1), (8, 2), (16, 1), (16, 2)):
        expected, found = (costs.step_s(*shape) / costs.step_s(1, 1) for costs in (quiet, busy))
        assert found == pytest.approx(expected, rel=0.13)
        raw = (BUSY[shape[0]][shape[1] - 1] / BUSY[1][0]) / (QUIET[shape[0]][shape[1] - 1] / QUIET[1][0])
        worst = max(worst, abs(math.log(raw)))
    assert worst > math.log(1.5), "one by one they say something else"


@pytest.mark.parametrize("seed", range(6))
def test_single_wrong_measurements_count_little(seed: int) -> None:
    numbers = random.Random(seed)
    truth = by_shape(QUIET)
    wrong = {shape: ms * math.exp(numbers.gauss(0, 0.3)) for shape, ms in truth.items()}
    right, found = TokenCosts(truth), TokenCosts(wrong)
    deviations = [abs(math.log(found.step_s(*shape) / right.step_s(*shape))) for shape in truth]
    raw = [abs(math.log(wrong[shape] / truth[shape])) for shape in truth]
    assert sum(deviations) < 0.65 * sum(raw)


def test_between_and_beyond_the_measurements() -> None:
    costs = TokenCosts(by_shape(QUIET))
    assert costs.step_s(4, 1) < costs.step_s(4, 1.25) < costs.step_s(4, 1.5) < costs.step_s(4, 2)
    assert costs.step_s(2, 1) < costs.step_s(3, 1) < costs.step_s(4, 1)
    assert costs.step_s(64, 9) == pytest.approx(4 * costs.step_s(16, 9), rel=0.1)
    two = TokenCosts({(1, 1): 1.0, (1, 2): 1.5})
    assert [two.step_s(1, 1), two.step_s(1, 2)] == pytest.approx([1.0, 1.5])


def test_costs_between_whole_tokens_are_not_kept() -> None:
    """Expected numbers of drafts are never the same twice: what is kept of them would fill the memory."""
    costs, numbers = TokenCosts(by_shape(QUIET)), random.Random(0)

    def ask(times: int) -> int:
        tracemalloc.start()
        for _ in range(times):
            costs.step_s(numbers.randint(1, 16), 1 + 8 * numbers.random())
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return kept

    ask(2000)
    assert ask(2000) < 2000


def test_a_measurement_near_the_line_counts_as_it_is() -> None:
    line, found = TokenCosts(by_shape(QUIET)), near_line(by_shape(QUIET))
    assert found[1, 1] == pytest.approx(QUIET[1][0])
    assert found[4, 1] == pytest.approx(QUIET[4][0])
    wrong = {shape: ms * (1.5 if shape == (4, 2) else 1.0) for shape, ms in by_shape(QUIET).items()}
    assert near_line(wrong)[4, 2] < 1.2 * QUIET[4][1]
    assert all(abs(math.log(ms / line.step_s(*shape))) < 0.041 for shape, ms in found.items())


def test_drafts_that_cost_more_than_was_measured_are_known_after_some_steps() -> None:
    """At all numbers of rows. What plain steps cost stays as it is."""
    table = CostTable(measured(by_shape(QUIET)))
    plain, drafting, other = StepShape(4, 1), StepShape(4, 1.5), StepShape(8, 2)
    before = {shape: table.step_s(shape) for shape in (plain, drafting, other, StepShape(8, 1))}
    more_s = before[drafting] - before[plain]
    for step in range(200):
        table.observe(drafting if step % 4 else plain, before[plain] + (1.8 * more_s if step % 4 else 0.0))
    assert table.step_s(plain) == before[plain]
    assert table.step_s(drafting) - before[plain] == pytest.approx(1.8 * more_s, rel=0.2)
    assert table.step_s(other) > before[other]


def test_steps_that_run_do_not_change_what_a_draft_costs_beside_them() -> None:
    """Corrected costs of shapes that run would be compared with measured ones of shapes that never do."""
    table = CostTable(measured(by_shape(QUIET)))
    shapes = [StepShape(4, width) for width in (1, 1.25, 1.5, 2)]
    before = [table.step_s(shape) for shape in shapes]
    for _ in range(300):
        table.observe(StepShape(1, 1), 4.4, 0.4)
        table.observe(StepShape(4, 1), 5.5, 0.5)
    assert [table.step_s(shape) for shape in shapes] == before


def test_the_host_s_part_is_learnt_of_plain_steps_and_of_steps_with_drafts() -> None:
    table = CostTable(measured(by_shape(QUIET)))
    assert table.host_part_s(has_drafts=True) == 0
    for step in range(200):
        width = 1 + step % 2
        table.observe(
            StepShape(1, width), 2 * QUIET[1][width - 1] + (0.6, 1.0)[step % 2], (0.6, 1.0)[step % 2]
        )
    plain_s, drafting_s = (table.host_part_s(has_drafts) for has_drafts in (False, True))
    # On a machine that is half as fast as in the measurement.
    assert plain_s == pytest.approx(0.3, rel=0.1)
    assert drafting_s == pytest.approx(0.5, rel=0.1)
    assert table.real_s(StepShape(1, 1)) == pytest.approx(2 * QUIET[1][0] + 0.6, rel=0.05)


def test_one_slow_step_of_the_host_counts_little() -> None:
    table = CostTable(measured(by_shape(QUIET)))
    for host_s in (0.4,) * 20 + (40.0,):
        table.observe(StepShape(1, 1), 4.0 + host_s, host_s)
    assert table.host_part_s(has_drafts=False) < 0.5
