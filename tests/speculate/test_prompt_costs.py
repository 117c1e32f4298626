"""What prompt chunks cost: interpolation, corrections from real passes, calibration, storage."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.plan import MANY_TOKENS, MAX_DECODED_WIDTH, CacheGeometry, StepPlan, StepResult
from outrider.speculate import calibration, cost_store
from outrider.speculate.acceptance import ModelAcceptance
from outrider.speculate.costs import CostTable, MeasuredCosts, StepShape, guessed_costs
from outrider.speculate.per_draft import PerDraftController, new_controller
from outrider.speculate.prompt_calibration import MAX_CHUNK_S, SIZES, measure_prompts
from outrider.speculate.prompt_costs import MeasuredPromptCosts, PromptCosts, PromptShape

MEASURED = MeasuredPromptCosts({16: 0.04, 64: 0.10, 256: 0.34}, 1e-6)


def chunk(size: int, start: int = 0) -> PromptShape:
    return PromptShape().plus(size, start)


def test_measured_sizes_are_given_back_and_others_follow() -> None:
    costs = PromptCosts(MEASURED)
    assert [costs.pass_s(chunk(size)) for size in (16, 64, 256)] == pytest.approx([0.04, 0.10, 0.34])
    assert costs.pass_s(chunk(160)) == pytest.approx(0.22)
    assert costs.pass_s(chunk(1)) == pytest.approx(0.04)  # a pass has a least cost
    assert costs.pass_s(chunk(512)) == pytest.approx(0.68)


def test_attention_to_the_cells_before_is_counted() -> None:
    costs = PromptCosts(MEASURED)
    assert costs.pass_s(chunk(64, 5000)) == pytest.approx(0.10 + 64 * 5000 * 1e-6)


@pytest.mark.parametrize(("share", "charged"), [(1.0, 90), (0.0, 45), (0.5, 67.5)])
def test_padding_is_charged_as_far_as_it_costs_something(share: float, charged: float) -> None:
    shape = chunk(30).plus(10, 0).plus(5, 0)
    assert PromptCosts(None, share).num_charged(shape) == charged


def test_the_best_chunk_is_the_smallest_that_loses_nothing() -> None:
    flat = MeasuredPromptCosts({64: 0.10, 128: 0.151, 256: 0.30, 512: 0.60})
    experts = MeasuredPromptCosts({64: 0.06, 512: 0.10, 2048: 0.16})  # nearly free up to 2,048 tokens
    assert PromptCosts(flat).best_size == 128
    assert PromptCosts(experts).best_size == 2048
    assert PromptCosts(None).best_size is None


def test_a_machine_that_is_three_times_as_slow_is_known_after_a_few_chunks() -> None:
    costs = PromptCosts(MEASURED)
    for _ in range(8):
        costs.observe(chunk(64), 0.3)
    assert costs.pass_s(chunk(64)) == pytest.approx(0.3, rel=0.1)
    assert costs.pass_s(chunk(256)) == pytest.approx(3 * 0.34, rel=0.1)


def test_one_slow_pass_changes_little() -> None:
    costs = PromptCosts(MEASURED)
    costs.observe(chunk(64), 30.0)
    assert costs.pass_s(chunk(64)) < 0.14
    for _ in range(6):
        costs.observe(chunk(64), 0.1)
    assert costs.pass_s(chunk(64)) == pytest.approx(0.1, rel=0.05)


def test_wrong_cost_of_cells_is_corrected_without_spoiling_short_prompts() -> None:
    costs, truth = PromptCosts(MEASURED), PromptCosts(MeasuredPromptCosts(MEASURED.pass_s, 5e-6))
    for start in range(0, 8192, 64):
        costs.observe(chunk(64, start), truth.pass_s(chunk(64, start)))
    assert costs.pass_s(chunk(64, 8000)) == pytest.approx(truth.pass_s(chunk(64, 8000)), rel=0.1)
    assert costs.pass_s(chunk(64)) < 2 * truth.pass_s(chunk(64))


def test_passes_of_many_tokens_take_memory_for_dequantised_weights() -> None:
    measured = MeasuredPromptCosts({16: 0.04}, 0.0, token_bytes=10, pair_bytes=2)
    costs = PromptCosts(measured, copied_bytes=10**6)
    assert costs.pass_bytes(chunk(MANY_TOKENS - 1)) == 10 * (MANY_TOKENS - 1)
    assert costs.pass_bytes(chunk(MANY_TOKENS, 100)) == (10 + 2 * 100) * MANY_TOKENS + 10**6
    padded = chunk(MANY_TOKENS // 4).plus(1, 0).plus(1, 0).plus(1, 0)
    assert costs.pass_bytes(padded) == 10 * MANY_TOKENS + 10**6, "padding counts as tokens"
    many_rows = PromptShape(MANY_TOKENS, MAX_DECODED_WIDTH, MANY_TOKENS * MAX_DECODED_WIDTH)
    assert costs.pass_bytes(many_rows) == 10 * MANY_TOKENS * MAX_DECODED_WIDTH, "as narrow as decode passes"
    assert PromptCosts(None, copied_bytes=10**6).pass_bytes(chunk(MANY_TOKENS)) == 10**6
    assert PromptCosts(None, copied_bytes=10**6).pass_bytes(chunk(MANY_TOKENS - 1)) == 0


@pytest.mark.parametrize("overlaps_steps", [True, False])
def test_the_memory_of_a_pass_is_that_of_its_padded_shape(overlaps_steps: bool) -> None:
    controller = new_controller(None, None, overlaps_steps, copied_bytes=10**6)
    padded_to_many = chunk(MANY_TOKENS - 1)
    assert controller.prompt_costs.pass_bytes(padded_to_many) == (10**6 if overlaps_steps else 0)
    assert controller.prompt_costs.pass_bytes(chunk(MANY_TOKENS)) == 10**6


def test_controllers_that_judge_each_draft_count_dequantised_weights_too() -> None:
    costs = CostTable(MeasuredCosts({(1, 1): 1.0, (1, 2): 1.5}, {}, padding_share=0.0))
    controller = new_controller(costs, None, overlaps_steps=False, copied_bytes=10**6)
    assert isinstance(controller, PerDraftController)
    assert controller.prompt_costs.pass_bytes(chunk(MANY_TOKENS)) == 10**6


def test_unmeasured_costs_are_unknown_until_the_first_pass() -> None:
    costs = PromptCosts(None)
    assert not costs.is_known
    assert costs.pass_s(chunk(100)) == 0
    costs.observe(chunk(100), 2.0)
    assert costs.is_known
    assert costs.pass_s(chunk(50)) == pytest.approx(1.0)


def test_decode_steps_are_known_in_seconds_once_one_has_run_or_was_measured() -> None:
    plain = StepShape(1, 1)
    assert CostTable(MeasuredCosts({(1, 1): 0.02, (1, 2): 0.03}, {})).real_s(plain) == pytest.approx(0.02)
    guessed = CostTable(guessed_costs(), in_seconds=False)
    assert guessed.real_s(plain) is None
    for _ in range(3):
        guessed.observe(plain, 0.05)
    assert guessed.real_s(plain) == pytest.approx(0.05)


# -- measuring -------------------------------------------------------------------------------------------


class TimedRunner:
    """Takes the time that a function of (size, cells before) says, on a clock of its own."""

    compiles = False
    has_head = True

    def __init__(self, seconds_of: Callable[[int, int], float]) -> None:
        self.now_s = 0.0
        self.num_resets = 0
        self._seconds_of = seconds_of
        self._capacity = 0

    def geometry(self, capacity_step: int) -> CacheGeometry:
        return CacheGeometry(1000, 0, capacity_step)

    def run(self, plan: StepPlan) -> StepResult:
        ((row,),) = plan.batches
        assert row.feeds_head
        assert not row.is_sampling
        self.now_s += self._seconds_of(row.num_fed, row.start)
        if plan.capacity != self._capacity:  # the caches are made first
            self._capacity = plan.capacity
            self.now_s += 0.5
        return StepResult()

    def reset(self) -> None:
        self.num_resets += 1

    def clock(self) -> float:
        return self.now_s


def measured(runner: TimedRunner, max_cells: int = 8192, budget_bytes: int = 1 << 30) -> MeasuredPromptCosts:
    found = measure_prompts(runner, 1000, max_cells, budget_bytes, clock=runner.clock)
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def _much_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "BUDGET_S", 1000.0)


def test_measuring_finds_the_costs() -> None:
    runner = TimedRunner(lambda size, start: 0.01 + size * 1e-5 + size * start * 1e-8)
    found = measured(runner)
    assert found.pass_s == pytest.approx({size: 0.01 + size * 1e-5 for size in SIZES})
    assert found.pair_s == pytest.approx(1e-8)
    assert runner.num_resets == 1


def test_a_slow_machine_measures_no_chunk_that_others_would_wait_for() -> None:
    runner = TimedRunner(lambda size, start: size / 200)
    found = measured(runner)
    assert max(found.pass_s) == 128
    assert max(found.pass_s.values()) <= MAX_CHUNK_S


def test_a_busy_moment_does_not_spoil_the_measurement() -> None:
    """Everything that runs in the first three seconds takes five times as long."""
    runner = TimedRunner(lambda size, start: size * 1e-3 * (5 if runner.now_s < 3 else 1))
    found = measured(runner)
    assert found.pass_s == pytest.approx({size: size * 1e-3 for size in found.pass_s})


def test_measuring_stops_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "BUDGET_S", 0.0)
    found = measured(TimedRunner(lambda size, start: size / 1e6))
    assert sorted(found.pass_s) == list(SIZES[:2])


def test_measuring_keeps_within_context_and_memory() -> None:
    fast = lambda size, start: size / 1e6  # noqa: E731
    assert max(measured(TimedRunner(fast), max_cells=200).pass_s) == 128
    assert max(measured(TimedRunner(fast), budget_bytes=513 * 1000).pass_s) == 256
    runner = TimedRunner(fast)
    assert measure_prompts(runner, 1000, 20, 1 << 30, clock=runner.clock) is None


# -- keeping ---------------------------------------------------------------------------------------------


def test_costs_of_prompts_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_store, "folder", lambda: tmp_path)
    for prompts in (MEASURED, None):
        cost_store.save("a", CostTable(guessed_costs()), ModelAcceptance(), prompts)
        found = cost_store.load("a")
        assert found is not None
        assert found.prompts == prompts


@pytest.mark.parametrize("bad", [{}, {"pass_s": [], "pair_s": 0}, {"pass_s": [[16, math.nan]], "pair_s": 0}])
def test_damaged_costs_of_prompts_are_as_good_as_none(
    bad: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_store, "folder", lambda: tmp_path)
    cost_store.save("a", CostTable(guessed_costs()), ModelAcceptance(), MEASURED)
    file = tmp_path / "a.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"prompts": bad}))
    assert cost_store.load("a") is None
