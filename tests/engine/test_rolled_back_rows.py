"""Rows of recurrent models with lazy grammars: overlapped, and rolled back where a grammar wakes unread."""

from __future__ import annotations

import random

import pytest
from fake_runner import FakeRunner
from scheduler_harness import PAGE, Harness

from outrider.plan import CacheGeometry, StepPlan

STATE_BYTES = 50


def played(seed: int, block_size: int | None = None, step_bytes: float = float("inf")) -> Harness:
    rng = random.Random(seed)
    geometry = CacheGeometry(1, STATE_BYTES, PAGE, block_size)
    harness = Harness(geometry=geometry, ahead=0.8, seed=seed, step_bytes=step_bytes, prefix_bytes=10**6)
    for _ in range(3):
        harness.add(rng.randint(1, 20), max_tokens=40, depth=rng.choice((0, 0, 4)), wakes=(2, 9))
    harness.run_to_idle()
    return harness


@pytest.mark.parametrize("block_size", [None, 4])
def test_rows_are_overlapped_and_continue_the_text_that_stands(block_size: int | None) -> None:
    harnesses = [played(seed, block_size) for seed in range(8)]
    assert sum(harness.num_ahead for harness in harnesses) > 20
    assert sum(harness.runner.num_restored for harness in harnesses) > 5


def test_a_row_that_is_not_restored_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(self: FakeRunner, plan: StepPlan) -> None:
        self.versions.clear()

    monkeypatch.setattr(FakeRunner, "_restore", forgets)
    with pytest.raises(AssertionError, match="the state has read another text"):
        [played(seed) for seed in range(8)]


def test_rows_wait_for_the_host_where_two_more_versions_of_the_states_do_not_fit() -> None:
    assert played(0).num_ahead > 0
    assert played(0, step_bytes=STATE_BYTES).num_ahead == 0
