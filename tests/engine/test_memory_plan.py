"""The parts of the memory: they add up to the limit, and the default number of rows follows from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import EngineConfig
from outrider.engine.memory_plan import (
    MAX_CPU_ROWS,
    MAX_ROWS,
    MIN_ROWS,
    MemoryPlan,
    MemoryUse,
    default_max_rows,
    plan_memory,
)
from outrider.plan import CacheGeometry

GIB = 1 << 30


def total(plan: MemoryPlan) -> int:
    return plan.weights + plan.rows + plan.prefixes + plan.images + plan.steps


@given(
    free=st.integers(GIB, 200 * GIB),
    weights=st.integers(0, 100 * GIB),
    prefixes=st.none() | st.integers(0, GIB // 4),
    reads_images=st.booleans(),
)
def test_the_parts_add_up_to_the_limit(
    free: int, weights: int, prefixes: int | None, reads_images: bool
) -> None:
    config = EngineConfig(prefix_cache_bytes=prefixes)
    plan = plan_memory(config, free, weights, reads_images)
    assert total(plan) == plan.limit == free + weights
    assert plan.excess == 0
    assert plan.images == (config.image_cache_bytes if reads_images else 0)
    assert plan.steps >= 0.39 * (free - plan.images)  # what a step computes with is not given to caches
    assert plan.rows > 0


def test_the_operators_budgets_are_taken_as_they_are_and_an_excess_is_known() -> None:
    config = EngineConfig(memory_budget_bytes=8 * GIB, prefix_cache_bytes=4 * GIB)
    plan = plan_memory(config, 10 * GIB, 2 * GIB, reads_images=False)
    assert (plan.rows, plan.prefixes) == (8 * GIB, 4 * GIB)
    assert plan.excess == total(plan) - 12 * GIB > 2 * GIB
    alone = plan_memory(EngineConfig(memory_budget_bytes=4 * GIB), 10 * GIB, 2 * GIB, reads_images=False)
    assert (alone.rows, alone.prefixes, alone.excess) == (4 * GIB, GIB, 0)


def test_a_machine_without_free_memory_still_gets_small_caches() -> None:
    plan = plan_memory(EngineConfig(), 0, GIB, reads_images=False)
    assert plan.rows > 0
    assert plan.excess > 0


@pytest.mark.parametrize(
    ("row_bytes", "rows"),
    [(0, MIN_ROWS), (40 * 2049 * 1000, 40), (10**12, MAX_ROWS), (17 * 2049 * 1000 - 1, MIN_ROWS)],
)
def test_default_rows_follow_from_memory_and_model(row_bytes: int, rows: int) -> None:
    """A row of 2,048 tokens has 2,049 cells here, of 1,000 bytes each."""
    assert default_max_rows(CacheGeometry(1000), row_bytes) == rows
    assert default_max_rows(CacheGeometry(1000), row_bytes, MAX_CPU_ROWS) == MAX_CPU_ROWS


def test_what_no_other_part_explains_is_counted_as_the_steps() -> None:
    plan = MemoryPlan(limit=100, weights=40, rows=30, prefixes=10, images=5, steps=15)
    use = MemoryUse(plan, rows=12, prefixes=3, images=1, held=60)
    assert use.used == {"weights": 40, "rows": 12, "prefixes": 3, "images": 1, "adapters": 0, "steps": 4}
    assert sum(use.budgets.values()) == use.limit_bytes == 100
    assert MemoryUse(plan, 12, 3, 1, held=50).used["steps"] == 0
