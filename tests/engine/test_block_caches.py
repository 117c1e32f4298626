"""Rows that keep their cells by blocks: what they cost in memory, and that nothing moves."""

from __future__ import annotations

import pytest
from scheduler_harness import FakeText, Harness, rows_of

from outrider.engine import block_caches
from outrider.engine.sequence import Sequence
from outrider.plan import NUM_SPARE_BLOCKS, CacheGeometry
from outrider.request import MAX_DEPTH, Request, SamplingParams
from outrider.speculate.costs import CostTable, guessed_costs
from outrider.speculate.shapes import ShapePolicy

SIZE = 64
PER_CELL = 10
GEOMETRY = CacheGeometry(PER_CELL, block_size=SIZE)
WITH_STATES = CacheGeometry(PER_CELL, bytes_per_slot=50, block_size=SIZE)
TEXT = [(i * i + i // 7) % 16 for i in range(5000)]


def harness(**changes: object) -> Harness:
    named = {"max_rows": 16, "prefill_step_size": 512, "geometry": GEOMETRY, "prefix_bytes": 10**7, **changes}
    return Harness(**named)  # type: ignore[arg-type]


def need(row: Sequence) -> int:
    """Bytes that a row alone needs, rounded to blocks."""
    return -(-(len(row.tokens) + MAX_DEPTH) // SIZE) * SIZE * PER_CELL


def run_until_all_decode(engine: Harness) -> None:
    engine.run_until(lambda: all(row.is_decoding for row in engine.live.values()))


def test_caches_with_few_sizes_are_not_copied_into_caches_of_the_same_size() -> None:
    """48 blocks are too many for 34, and the next size for 34 is 48."""
    shapes = ShapePolicy(CostTable(guessed_costs()), few=True)
    caches = block_caches.BlockCaches(GEOMETRY, 10**9, shapes)
    row = Sequence(1, Request("r", (1,) * 100, SamplingParams()), FakeText(), frozenset(), max_tokens=9)
    caches.extend(row, 32 * SIZE)
    caches.pool.grow(48)
    for _ in range(3 * block_caches.PATIENCE):
        assert caches.compact([row]) is None
    caches.pool.grow(64)
    kept = [caches.compact([row]) for _ in range(3 * block_caches.PATIENCE)]
    assert len([one for one in kept if one is not None]) == 1
    assert caches.pool.num_blocks == 48


def test_long_and_short_rows_hold_what_they_need() -> None:
    engine = harness()
    for length in (6000, *[100] * 7):
        engine.add(length, max_tokens=400)
    run_until_all_decode(engine)
    engine.steps(100)
    assert engine.runner.num_bytes <= 1.25 * sum(map(need, engine.live.values()))
    engine.run_to_idle()


def test_caches_grow_once_when_rows_that_came_together_end_their_blocks() -> None:
    engine = harness()
    rows = [engine.add([i, *TEXT[: 20 + 4 * i]], max_tokens=150) for i in range(8)]
    run_until_all_decode(engine)
    sizes = set()
    while min(len(row.blocks) for row in rows) < 3:
        sizes.add(engine.scheduler._budget.pool.num_blocks)
        engine.step()
    assert len(sizes) == 2


@pytest.mark.parametrize("num_first", [1, 8])
def test_a_shared_prefix_is_held_once(num_first: int) -> None:
    """Whether the rows come one after the other or all at once."""
    engine = harness()
    first = [engine.add([*TEXT[:4000], i], max_tokens=60) for i in range(num_first)]
    engine.run_until(lambda: first[0].is_decoding)
    for i in range(num_first, 8):
        engine.add([*TEXT[:4000], i], max_tokens=60)
    most = 0
    while not all(row.is_decoding for row in engine.live.values()):
        engine.step()
        most = max(most, engine.runner.num_bytes)
    assert len(engine.live) == 8
    assert most <= 1.3 * (need(first[0]) + NUM_SPARE_BLOCKS * SIZE * PER_CELL)
    assert len({row.blocks[61] for row in engine.live.values()}) == 1
    assert len({row.blocks[62] for row in engine.live.values()}) == 8, "the last block is each row's own"
    engine.run_to_idle()


def test_rows_share_with_a_row_that_still_decodes_and_outlive_it() -> None:
    engine = harness()
    first = engine.add(TEXT[:500], max_tokens=4)
    engine.run_until(lambda: first.is_decoding)
    second = engine.add([*TEXT[:450], 3], max_tokens=50)
    engine.run_until(lambda: second.is_decoding)
    assert second.blocks[:7] == first.blocks[:7]
    assert engine.runner.num_loaded == 2, "only the block that is not whole was copied"
    engine.run_until(lambda: first.slot is None)
    third = engine.add([*TEXT[:450], 4], max_tokens=5)
    engine.run_until(lambda: third.is_decoding)
    assert third.blocks[:7] == second.blocks[:7]
    engine.run_to_idle()


def test_a_block_that_the_head_has_still_to_write_is_not_shared() -> None:
    """The head of the first row was paused: the second row gets a copy, which its own head completes."""
    engine = harness(ahead=0.0)
    first = engine.add(TEXT[:100], max_tokens=200, depth=2, is_auto=True)
    engine.run_until(lambda: len(first.tokens) > 280 or first.slot is None)
    second = engine.add([*first.tokens[:260], 1, 2], max_tokens=30, depth=2)
    engine.run_to_idle()
    assert engine.answer(second).finish_reason is not None


def test_joining_growing_leaving_and_preempting_move_no_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_caches, "PATIENCE", 10**9)  # smaller caches are another matter
    engine = harness(budget_bytes=26 * SIZE * PER_CELL, prefix_bytes=None)
    rows = [engine.add(length, max_tokens=num) for length, num in ((900, 60), (60, 300), (70, 500), (80, 30))]
    blocks: dict[int, list[int]] = {}
    num_preempted = 0
    for step in range(600):
        plan = engine.step()
        if plan is None:
            break
        assert not plan.moves
        assert plan.kept_blocks is None
        if step == 20:
            engine.cancel(rows[1])
        if step == 25:
            rows.append(engine.add(600, max_tokens=900))
        for row in rows_of(plan):
            before = blocks.get(row.sequence_id, []) if row.start else []
            assert list(row.blocks[: len(before)]) == before, "a row's cells have moved"
            blocks[row.sequence_id] = list(row.blocks)
        num_preempted = sum(row.counters.preemptions for row in rows)
    assert num_preempted > 0
    engine.run_to_idle(most=3000)


def test_blocks_that_stay_free_are_given_back() -> None:
    engine = harness(prefix_bytes=None)
    long, short = engine.add(6000, max_tokens=20), engine.add(100, max_tokens=300)
    engine.run_until(lambda: long.id not in engine.live)
    before = engine.runner.num_bytes
    engine.steps(30)
    assert engine.runner.num_bytes < before / 10
    assert engine.runner.num_bytes <= 1.25 * need(short) + 4 * SIZE * PER_CELL
    engine.run_to_idle()


def test_states_move_and_cells_do_not() -> None:
    engine = harness(geometry=WITH_STATES, prefix_bytes=None)
    rows = [engine.add(100, max_tokens=num) for num in (5, 40, 40)]
    run_until_all_decode(engine)
    tables = [list(row.blocks) for row in rows]
    engine.run_until(lambda: rows[0].slot is None)
    plan = engine.step()
    assert plan is not None
    assert [(move.source, move.target) for move in plan.moves] == [(2, 0)]
    assert [row.blocks for row in rows[1:]] == tables[1:]
    engine.run_to_idle()


def test_cached_prefixes_must_have_blocks_of_the_same_size() -> None:
    engine = harness()
    assert engine.prefix is not None
    with pytest.raises(ValueError, match="blocks of 32 cells, cached prefixes 64"):
        engine.prefix.use_blocks(engine.scheduler._budget.pool, 32)
