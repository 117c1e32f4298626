"""The ablation of the drafts' controllers: it runs, leaves constants as they were, and knows all of them."""

from __future__ import annotations

import pytest
from benchmarks import depth_ablation, depth_cases

from outrider.engine import draft_planner
from outrider.speculate import (
    acceptance,
    confidence,
    controller,
    costs,
    depth,
    per_draft,
    shapes,
    token_costs,
)

MODULES = (acceptance, controller, costs, depth, draft_planner, confidence, per_draft, shapes, token_costs)


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth_ablation, "CASES", [each[3] for each in depth_cases.GROUPS])


@pytest.mark.usefixtures("few_cases")
def test_the_table_of_one_constant(capsys: pytest.CaptureFixture[str]) -> None:
    usual = per_draft.MAX_WAIT
    depth_ablation.print_constants(2, ["MAX_WAIT"])
    printed = capsys.readouterr().out
    for alternative in ("half", "double", "off"):
        assert f"{alternative} " in printed
    assert "per_draft.MAX_WAIT" in printed
    assert "acceptance." not in printed
    assert usual == per_draft.MAX_WAIT


def test_a_change_has_the_noise_of_its_seeds() -> None:
    first, second = depth_cases.CASES[:2]
    before = {first: [(1.0, 1.0), (1.1, 1.1)], second: [(0.9, 0.9), (0.9, 0.9)]}
    same = {case: [(last + 0.1, answer) for last, answer in each] for case, each in before.items()}
    (last, noise), (answer, _), (worst, _) = depth_ablation.changes(before, same)
    assert (last, noise, answer, worst) == pytest.approx((0.1, 0.0, 0.0, 0.1))
    noisy = {first: [(1.2, 1.0), (1.1, 1.1)], second: before[second]}
    (last, noise), *_ = depth_ablation.changes(before, noisy)
    assert (last, noise) == pytest.approx((0.05, 0.05))


def test_every_constant_is_in_the_ablation_or_known_to_be_outside() -> None:
    inside = {constant.name for constant in depth_ablation.constants()}
    found = {
        name
        for module in MODULES
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, int | float | tuple | dict)
    }
    no_constants = {"MAX_DEPTH", "ALL_DEPTHS", "FALLIBLE_SOURCES", "UNREAD"}
    assert found - inside - no_constants == set(depth_ablation.OUTSIDE)
