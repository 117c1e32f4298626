"""The cost table: interpolation, corrections from real steps, calibration, storage."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from depth_simulator import MACHINES, TRACED_MACHINES

from outrider.config import InvalidConfig
from outrider.plan import CacheGeometry, StepPlan, StepResult
from outrider.speculate import calibration, cost_store
from outrider.speculate.acceptance import ModelAcceptance
from outrider.speculate.costs import CostTable, HeadCost, MeasuredCosts, StepShape, guessed_costs
from outrider.speculate.shapes import FEW_WIDTHS

CPU = MACHINES["cpu"]
ROOM = 4096, 1 << 30  # cells of a row, bytes of the caches


def ratio(table: CostTable, rows: int = 1, width: int = 2) -> float:
    return table.step_s(StepShape(rows, width)) / table.step_s(StepShape(rows, 1))


def test_measured_shapes_are_given_back_and_others_lie_between() -> None:
    table = CostTable(CPU)
    assert table.step_s(StepShape(4, 3)) == pytest.approx(119.9)
    assert table.step_s(StepShape(6, 1)) == pytest.approx((84.9 + 105.0) / 2)
    assert table.step_s(StepShape(1, 7)) == pytest.approx((94.3 + 106.1) / 2)
    assert table.step_s(StepShape(32, 1)) > table.step_s(StepShape(16, 1))


def test_longer_rows_cost_more_and_a_width_relatively_less() -> None:
    table = CostTable(MeasuredCosts({(1, 1): 1.0, (1, 2): 1.5}, {}, 128, 0.001))
    long = [table.step_s(StepShape(1, width, num_cells=1128)) for width in (1, 2)]
    assert long == pytest.approx([2.0, 2.5])


@pytest.mark.parametrize("padding_share", [0.0, 0.3, 1.0])
def test_a_pass_whose_rows_are_mostly_padding_has_a_cost(padding_share: float) -> None:
    measured = replace(guessed_costs(), padding_share=padding_share)
    table = CostTable(measured)
    width = table.mean_width(rows=8, num_tokens=1, width=1)
    assert width == 1
    shape = StepShape(8, width, head_rows=1, num_drafts_next=1)
    assert table.step_s(shape) >= table.step_s(StepShape(1, 1))
    assert table.mean_width(rows=2, num_tokens=6, width=4) == 3 + padding_share


def test_head_costs_what_it_is_fed_and_makes() -> None:
    table = CostTable(MeasuredCosts({(1, 1): 1.0, (1, 2): 1.5}, {1: HeadCost(0.1, 0.2, 0.3)}))
    assert table.head_s(StepShape(1, 1)) == 0
    assert table.head_s(StepShape(1, 1, 1, 0)) == pytest.approx(0.1)
    assert table.head_s(StepShape(1, 2, 1, 3)) == pytest.approx(0.15 + 0.2 + 0.6)


def test_real_steps_correct_a_shape_that_was_measured_wrongly() -> None:
    wrong = CostTable(MeasuredCosts({(1, 1): 1.0, (1, 2): 2.0}, {}))
    for step in range(600):
        wrong.observe(StepShape(1, 1 + step % 2), (1.0, 1.3)[step % 2])
    assert 1.2 < ratio(wrong) < 1.5


def test_a_width_that_was_measured_wrongly_is_known_after_a_few_steps() -> None:
    """While heads are paused and probed now and then, the width is not seen often."""
    table, truth = CostTable(MeasuredCosts({(1, 1): 17.0, (1, 2): 30.0}, {})), 41.0
    for step in range(64):
        width = 2 if step % 8 == 7 else 1
        table.observe(StepShape(1, width), truth if width == 2 else 17.0)
    assert ratio(table) > 0.85 * truth / 17


@pytest.mark.parametrize("slow", [1.0, 4.0])
def test_a_busy_machine_and_slow_steps_do_not_spoil_the_table(slow: float) -> None:
    """Everything takes `slow` times as long, and one step in ten much longer, for any reason."""
    table, rng = CostTable(CPU), random.Random(3)
    truth = ratio(table, 4, 2)
    for step in range(400):
        shape = StepShape(4, 1 + (step // 7) % 2)
        hiccup = 30.0 if rng.random() < 0.1 else 1.0
        table.observe(shape, CostTable(CPU).step_s(shape) * slow * hiccup * rng.uniform(0.95, 1.2))
    assert ratio(table, 4, 2) == pytest.approx(truth, rel=0.15)


def test_a_burst_of_load_on_one_shape_passes() -> None:
    table = CostTable(CPU)
    truth = ratio(table, 1, 2)
    for _ in range(40):
        table.observe(StepShape(1, 1), 65.8)
    for _ in range(30):
        table.observe(StepShape(1, 2), 69.2 * 8)  # the machine was busy whenever it drafted
    assert ratio(table, 1, 2) < 1.3 * truth
    for _ in range(3000):
        table.observe(StepShape(1, 1), 65.8)
    assert ratio(table, 1, 2) == pytest.approx(truth, rel=0.12)


def test_first_step_of_a_shape_is_not_counted() -> None:
    table = CostTable(CPU)
    table.observe(StepShape(1, 1), 1e6)
    assert table.step_s(StepShape(1, 1)) == pytest.approx(65.8)


# -- measuring -------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the runner's own clock counts, however busy this machine is."""
    monkeypatch.setattr(calibration, "MAX_WALL_FACTOR", math.inf)


class TimedRunner:
    """Takes the time that a table says, on a clock of its own, and more for what is done once.

    A shape's first step takes ten times as long, and caches of another shape have to be made first.
    """

    def __init__(self, truth: MeasuredCosts, has_head: bool = True, compiles: bool = False) -> None:
        self.now_s = 0.0
        self.compiles = compiles
        self.has_head = has_head
        self.num_resets = 0
        self.num_under_way = 0
        self.idle_s = 0.0  # how long the device waits after a step that nothing follows
        self.disturb = lambda seconds: seconds  # what other processes make of a step's time
        self._truth = CostTable(truth)
        self._seen: set[tuple[StepShape, int]] = set()
        self._caches = (0, 0)

    def geometry(self, capacity_step: int) -> CacheGeometry:
        return CacheGeometry(1000, 0, capacity_step)

    def run(self, plan: StepPlan) -> StepResult:
        return self.finish(self.launch(plan))

    def launch(self, plan: StepPlan) -> StepPlan:
        self.num_under_way += 1
        return plan

    def finish(self, launched: StepPlan) -> StepResult:
        plan = launched
        self.num_under_way -= 1
        if not self.num_under_way:
            self.now_s += self.idle_s
        (batch,) = plan.batches
        row = batch[0]
        drafting = len(batch) if row.feeds_head else 0
        sampled = 0 if row.params.is_greedy else len(batch)
        shape = StepShape(len(batch), row.num_fed, drafting, row.num_drafts_next, row.start, sampled)
        step_s = self._truth.step_s(shape) + drafting * row.head_lag * self._truth.measured.missed_cell_s
        self.now_s += self.disturb(step_s) * (1 if (shape, row.head_lag) in self._seen else 10)
        self._seen.add((shape, row.head_lag))
        if self._caches != (plan.num_slots, plan.capacity):
            self._caches = (plan.num_slots, plan.capacity)
            self.now_s += 5 * self._truth.step_s(shape)
        return StepResult()

    def reset(self) -> None:
        self.num_resets += 1

    def clock(self) -> float:
        return self.now_s


def scaled(table: MeasuredCosts, by: float) -> MeasuredCosts:
    head = {r: HeadCost(c.feed_s * by, c.first_s * by, c.each_s * by) for r, c in table.head.items()}
    trunk = {k: s * by for k, s in table.trunk_s.items()}
    return MeasuredCosts(trunk, head, table.num_cells, 1e-6, 0.7 * by, 0.2 * by, missed_cell_s=0.01 * by)


@pytest.mark.parametrize("machine", ["cpu", "gpu", "cliffs"])
def test_measuring_finds_the_costs(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "BUDGET_S", 600.0)
    truth = scaled((MACHINES | TRACED_MACHINES)[machine], 1e-3)
    runner = TimedRunner(truth, compiles=machine in TRACED_MACHINES)
    found = calibration.measure(runner, 1000, 16, 4096, 1 << 30, clock=runner.clock)
    assert found is not None
    assert runner.num_resets == 1
    shapes = [shape for shape in truth.trunk_s if not runner.compiles or shape[1] in FEW_WIDTHS]
    assert all(found.trunk_s[shape] == pytest.approx(truth.trunk_s[shape], rel=0.02) for shape in shapes)
    assert found.cell_s == pytest.approx(1e-6)
    assert found.sample_s == pytest.approx(truth.sample_s)
    assert found.draft_sample_s == pytest.approx(truth.draft_sample_s)
    assert found.missed_cell_s == pytest.approx(0 if runner.compiles else truth.missed_cell_s)
    for depth in (1, 4, 8):
        shape = StepShape(4, 1, 4, depth)
        assert CostTable(found).head_s(shape) == pytest.approx(CostTable(truth).head_s(shape), rel=0.25)


def test_measuring_stops_when_its_time_is_up_with_what_matters_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "BUDGET_S", 0.0)
    runner = TimedRunner(scaled(CPU, 1e-3))
    found = calibration.measure(runner, 1000, 16, 4096, 1 << 30, clock=runner.clock)
    assert found is not None
    assert {(1, 1), (1, 2), (1, 4), (16, 1), (16, 2)} <= found.trunk_s.keys()
    assert set(found.head) == {1, 4, 16}


def busy(seed: int) -> Callable[[float], float]:
    """Other processes make seven of ten steps longer, up to five times."""
    numbers = random.Random(seed)
    return lambda seconds: seconds * (1 if numbers.random() < 0.3 else 1 + 4 * numbers.random())


@pytest.mark.parametrize("seed", range(8))
def test_other_processes_hardly_change_what_is_measured(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "BUDGET_S", 600.0)
    truth = scaled(MACHINES["quantised"], 1e-3)
    runner = TimedRunner(truth)
    runner.disturb = busy(seed)
    found = calibration.measure(runner, 1000, 16, 4096, 1 << 30, clock=runner.clock)
    assert found is not None
    wrong = [shape for shape, seconds in truth.trunk_s.items() if found.trunk_s[shape] > 1.1 * seconds]
    assert len(wrong) <= 2, "of 32"
    for (rows, width), seconds in found.trunk_s.items():
        assert all(s >= seconds for (r, w), s in found.trunk_s.items() if r >= rows and w >= width)


def test_stored_costs_of_a_busy_start_are_measured_again_at_a_quiet_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibration, "BUDGET_S", 600.0)
    truth = scaled(MACHINES["quantised"], 1e-3)
    for shape in ((1, 4), (4, 1), (4, 4), (16, 1)):
        for factor in (0.6, 1.6):
            wrong = {key: s * factor if key == shape else s for key, s in truth.trunk_s.items()}
            runner = TimedRunner(truth)
            stored = replace(truth, trunk_s=wrong)
            assert not calibration.is_still_valid(runner, 1000, stored, *ROOM, clock=runner.clock)
    runner = TimedRunner(truth)
    assert calibration.is_still_valid(runner, 1000, truth, *ROOM, clock=runner.clock)
    assert calibration.is_still_valid(runner, 1000, truth, 10, 1, clock=runner.clock), "there is no room"


def test_stored_costs_are_not_given_up_while_the_machine_is_busy() -> None:
    stored = scaled(CPU, 1e-3)
    for seed in range(20):
        runner = TimedRunner(stored)
        runner.disturb = busy(seed)
        assert calibration.is_still_valid(runner, 1000, stored, *ROOM, clock=runner.clock)


def test_the_environment_sets_the_time_and_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calibration.budget_s({}) == 10
    assert calibration.budget_s({calibration.VARIABLE: "0.5"}) == 0.5
    for bad in ("fast", "-1", "nan", "inf"):
        with pytest.raises(InvalidConfig, match=f"must be a number of seconds, not '{bad}'"):
            calibration.budget_s({calibration.VARIABLE: bad})
    monkeypatch.setenv("OUTRIDER_COSTS", "/somewhere")
    assert cost_store.folder() == Path("/somewhere")
    monkeypatch.delenv("OUTRIDER_COSTS")
    monkeypatch.setenv("OUTRIDER_CACHE", "/cache")
    assert cost_store.folder() == Path("/cache/depth")


def test_compiling_is_not_a_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "BUDGET_S", 0.0)  # no shape is timed twice
    truth = scaled(CPU, 1e-3)
    runner = TimedRunner(truth, compiles=True)
    found = calibration.measure(runner, 1000, 16, 4096, 1 << 30, clock=runner.clock)
    assert found is not None
    assert len(found.trunk_s) >= 6
    assert all(seconds == pytest.approx(truth.trunk_s[shape]) for shape, seconds in found.trunk_s.items())


def test_sampled_tokens_cost_more_at_every_position() -> None:
    table = CostTable(MeasuredCosts(CPU.trunk_s, CPU.head, sample_s=0.5))
    for width in (1, 3):
        greedy, sampled = (table.step_s(StepShape(4, width, num_sampled=num)) for num in (0, 3))
        assert sampled - greedy == pytest.approx(3 * width * 0.5)


def test_sampled_drafts_cost_more_for_the_rows_that_the_head_drafts_for() -> None:
    table = CostTable(MeasuredCosts(CPU.trunk_s, CPU.head, draft_sample_s=0.2))
    greedy, sampled, some = (table.step_s(StepShape(4, 1, 3, 2, num_sampled=num)) for num in (0, 4, 1))
    assert sampled - greedy == pytest.approx(3 * 2 * 0.2)
    assert some - greedy == pytest.approx(1 * 2 * 0.2)


def test_how_long_the_device_waits_for_the_host_is_learnt() -> None:
    table = CostTable(CPU)
    for _ in range(60):
        table.observe(StepShape(4, 1), 0.1, None)
    assert table.host_share == 0
    for _ in range(60):
        table.observe(StepShape(4, 1), 0.1, 0.02)
    assert table.host_share == pytest.approx(0.2, rel=0.01)


def test_where_passes_are_traced_the_widths_that_they_have_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibration, "BUDGET_S", 600.0)
    runner = TimedRunner(scaled(CPU, 1e-3), compiles=True)
    found = calibration.measure(runner, 1000, 4, 4096, 1 << 30, clock=runner.clock)
    assert found is not None
    assert {width for _, width in found.trunk_s} == set(FEW_WIDTHS)


def test_where_steps_are_launched_ahead_they_are_measured_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "BUDGET_S", 0.0)
    truth = scaled(CPU, 1e-3)
    runner = TimedRunner(truth, compiles=True)
    runner.idle_s = 0.01
    found = calibration.measure(runner, 1000, 16, 4096, 1 << 30, clock=runner.clock)
    assert found is not None
    assert all(seconds == pytest.approx(truth.trunk_s[shape]) for shape, seconds in found.trunk_s.items())


def test_measuring_keeps_within_rows_context_and_memory() -> None:
    runner = TimedRunner(scaled(CPU, 1e-3), has_head=False)
    found = calibration.measure(runner, 1000, 3, 200, 600_000, clock=runner.clock)
    assert found is not None
    assert max(rows for rows, _ in found.trunk_s) == 2
    assert found.head == {}
    assert calibration.measure(runner, 1000, 3, 100, 1 << 30, clock=runner.clock) is None


def test_stored_costs_are_checked_against_the_machine() -> None:
    runner = TimedRunner(scaled(CPU, 1e-3))
    for _ in range(2):
        assert calibration.is_still_valid(runner, 1000, scaled(CPU, 2e-3), *ROOM, clock=runner.clock)
    assert not calibration.is_still_valid(runner, 1000, MACHINES["linear"], *ROOM, clock=runner.clock)


# -- keeping ---------------------------------------------------------------------------------------------


def test_the_reach_of_a_table_is_known_before_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of a small engine is none for a large one."""
    monkeypatch.setattr(calibration, "BUDGET_S", 600.0)
    for max_rows in (1, 2, 4, 6, 16, 48, 64):
        runner = TimedRunner(scaled(CPU, 1e-8))
        found = calibration.measure(runner, 1000, max_rows, 4096, 1 << 30, clock=runner.clock)
        assert found is not None
        measured = {rows for rows, _ in found.trunk_s}
        reach = calibration.max_measured_rows(max_rows)
        assert reach in measured
        assert not any(reach < count <= max_rows for count in calibration.ROW_COUNTS)


def test_costs_corrections_and_acceptance_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_store, "folder", lambda: tmp_path / "depth")
    table, acceptance = CostTable(CPU), ModelAcceptance()
    for step in range(300):
        table.observe(StepShape(1, 1 + step % 2), (65.8, 80.0)[step % 2])
        acceptance.add("head", False, 2, 1)
    cost_store.save("a", table, acceptance)
    found = cost_store.load("a")
    assert found is not None
    assert found.measured == CPU
    assert found.acceptance.as_json() == acceptance.as_json()
    assert ratio(CostTable(found.measured, found.corrections)) == pytest.approx(ratio(table), rel=0.01)
    assert [file.name for file in (tmp_path / "depth").iterdir()] == ["a.json"]
    assert cost_store.load("b") is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: json.dumps({**json.loads(text), "corrections": [[1, 1, 3.0]]}),
        lambda text: json.dumps({**json.loads(text), "acceptance": [["head", False, [1], [2]]]}),
        lambda text: text.replace("65.8", "NaN"),
        lambda text: text.replace("65.8", "-1"),
    ],
)
def test_a_damaged_file_is_as_good_as_none(damage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_store, "folder", lambda: tmp_path)
    cost_store.save("a", CostTable(CPU), ModelAcceptance())
    file = tmp_path / "a.json"
    file.write_text(damage(file.read_text()))
    assert cost_store.load("a") is None


def test_a_folder_that_cannot_be_written_costs_nothing_but_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(cost_store, "folder", lambda: tmp_path / "file" / "depth")
    cost_store.save("a", CostTable(guessed_costs()), ModelAcceptance())
    assert "cannot be stored" in caplog.text
    assert cost_store.load("a") is None


def test_every_part_of_the_fingerprint_counts() -> None:
    base = {"model": "m", "device": "cpu", "dtype": "float32"}
    names = {cost_store.fingerprint({**base, key: "other"}) for key in base} | {cost_store.fingerprint(base)}
    assert len(names) == 4
