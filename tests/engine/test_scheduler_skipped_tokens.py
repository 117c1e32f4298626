"""Rows that skip tokens of their prompts, in the scheduler: the fake runner checks cells and positions."""

from __future__ import annotations

import random

import pytest
from scheduler_harness import PAGE, Harness, planned_ids

from outrider.plan import CacheGeometry

SLOTS = CacheGeometry(bytes_per_cell=1, capacity_step=PAGE)
BLOCKS = CacheGeometry(bytes_per_cell=1, capacity_step=PAGE, block_size=16)


@pytest.mark.parametrize("seed", range(12))
def test_random_histories_give_every_row_the_answer_to_what_it_has_read(seed: int) -> None:
    """Prompts with and without skipped tokens, drafts, small memory, failed steps, overlapped steps."""
    rng = random.Random(seed)
    harness = Harness(
        max_rows=rng.choice([1, 3, 4]),
        prefill_step_size=rng.choice([7, 32, 100]),
        geometry=rng.choice([SLOTS, BLOCKS]),
        budget_bytes=rng.choice([None, 900]),
        seed=seed,
        prefix_bytes=rng.choice([None, 400]),
        block_size=16,
        ahead=rng.choice([0.0, 0.6]),
    )
    rows = [
        harness.add(
            rng.choice([20, 130, 200]),
            max_tokens=rng.randint(1, 40),
            depth=rng.choice([0, 2, 4]),
            keep=rng.choice([None, 0.3, 0.6, 1.0]),
        )
        for _ in range(7)
    ]
    for _ in range(rng.choice([0, 3])):
        harness.steps(rng.randint(1, 20))
        if rng.random() < 0.5:
            harness.runner.raises_next = True
        elif harness.live:
            harness.cancel(rng.choice(list(harness.live.values())))
    harness.run_to_idle()
    ended = [row for row in rows if harness.answer(row).finish_reason == "length"]
    assert all(row.kept is not None for row in ended if row.params.spec_prefill is not None and skips(row))


def skips(row) -> bool:  # type: ignore[no-untyped-def]
    return row.params.spec_prefill.keep < 1 and row.num_prompt > 100


def test_a_preempted_row_is_not_scored_again() -> None:
    harness = Harness(max_rows=2, geometry=SLOTS, budget_bytes=2 * 16 * PAGE + 2)
    first = harness.add(100, max_tokens=200)
    second = harness.add(200, max_tokens=150, keep=0.3)
    harness.run_to_idle()
    assert second.counters.preemptions > 0
    assert second.kept is not None
    assert harness.answer(first).finish_reason == harness.answer(second).finish_reason == "length"


def test_a_prompt_is_scored_in_parts_while_others_decode() -> None:
    harness = Harness(prefill_step_size=32)
    decoding = harness.add(10, max_tokens=30)
    harness.run_until(lambda: decoding.is_decoding)
    skipping = harness.add(200, keep=0.5)
    scored = []
    while skipping.awaits_scores:
        plan = harness.step()
        assert plan is not None
        assert planned_ids(plan) == [decoding.id] or not skipping.awaits_scores
        scored.append(skipping.num_scored)
    assert scored == [0, 32, 64, 96, 128, 160, 192, 200]  # it gets its row in the first step
    harness.run_to_idle()


def test_cells_of_skipping_rows_are_not_shared() -> None:
    harness = Harness(prefix_bytes=10_000, block_size=16)
    prompt = [i % 16 for i in range(160)]
    harness.add(prompt, keep=0.5)
    harness.run_to_idle()
    assert harness.runner.prefix_bytes == 0
    harness.add(prompt)
    harness.run_to_idle()
    held = harness.runner.prefix_bytes
    assert held > 0
    harness.add(prompt, keep=1.0)
    harness.add(prompt, keep=0.5)
    harness.run_to_idle()
    assert (harness.runner.prefix_bytes, harness.runner.num_loaded) == (held, 0)
