"""Padding rows, which make a pass as large as one that was traced: nobody can tell that they were there."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from outrider.cache.ragged_kv import RaggedKV
from outrider.models.heads import LoadedHead
from outrider.models.trunk import Trunk
from outrider.plan import PassShape, RowPlan, StepPlan, StepResult
from outrider.request import SamplingParams
from outrider.step.batch import InvalidLogits
from outrider.step.compiled import PADDING_ID, is_traceable, padding_rows
from outrider.step.runner import Runner
from plan_rows import plan_row
from step.histories import world
from tiny_models import tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=12)
HOT = SamplingParams(temperature=0.9, seed=5, max_tokens=12)
CAPACITY = 96
SLOTS = 6
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8]]
WITH_HEADS = [
    "llama",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_5",
    "qwen3_next",
    "nemotron_h",
    "kimi_linear",
    "gpt_oss kv8",
]
HEADLESS = ["mamba2", "falcon_h1", "lfm2"]


@pytest.fixture(autouse=True)
def not_compiled() -> None:
    """What would be traced is run as it is, from the very closures that a trace has."""
    mx.disable_compile()


def runner_of(family: str) -> Runner:
    if family in HEADLESS:
        return Runner(Trunk(tiny_model(family), max_context=256), compiles=True)
    tiny = world(family)
    return Runner(tiny.trunk, LoadedHead((tiny.head,), "random"), compiles=True)


def reads(slot: int) -> RowPlan:
    """A row that is in the middle of its prompt."""
    return plan_row(PROMPTS[slot], params=GREEDY, slot=slot, start=0, feeds_head=True, next_id=7)


def picks(slot: int, drafts: tuple[int, ...] = ()) -> RowPlan:
    params = HOT if slot else GREEDY
    return plan_row(PROMPTS[slot], [7], drafts, params=params, slot=slot, feeds_head=True, num_drafts_next=3)


def run(runner: Runner, rows: tuple[RowPlan, ...], shape: PassShape) -> StepResult:
    return runner.run(StepPlan(SLOTS, CAPACITY, (), (rows,), (shape,)))


def slots_from(runner: Runner, first: int) -> Iterator[np.ndarray]:
    """What the caches hold there, but for the cells that take what nobody reads."""
    for buffers in runner._buffers():
        for array in buffers.arrays():
            part = np.array(array[first:].astype(mx.float32))
            yield part[:, :, :-1] if isinstance(buffers, RaggedKV) else part


@pytest.mark.parametrize("num_rows", [3, SLOTS])
@pytest.mark.parametrize("drafts", [(), (2, 8)], ids=["plain", "drafting"])
@pytest.mark.parametrize("family", [*WITH_HEADS, *HEADLESS])
def test_slots_under_ghosts_stay_as_they_were(family: str, drafts: tuple[int, ...], num_rows: int) -> None:
    """The row in slot 2 is reading its prompt while two others decode in a pass made for more."""
    runner = runner_of(family)
    run(runner, (reads(0), reads(1), reads(2)), PassShape())
    before = list(slots_from(runner, 2))
    assert any(part.any() for part in before)
    rows = picks(0, drafts), picks(1)
    found = run(runner, rows, PassShape(num_rows, 1 + len(drafts)))
    for was, now in zip(before, slots_from(runner, 2), strict=True):
        np.testing.assert_array_equal(was, now)
    runner.reset()

    alone = runner_of(family)
    run(alone, (reads(0), reads(1), reads(2)), PassShape())
    assert run(alone, rows, PassShape()) == found
    assert [row.sequence_id for row in found.rows] == [0, 1]
    assert all(len(row.drafts) == (0 if family in HEADLESS else 3) for row in found.rows)
    alone.reset()


def test_ghosts_beside_a_head_of_several_layers() -> None:
    """Its later layers write cells again: of padding none."""
    tiny = world("llama")

    def answers(num_rows: int) -> tuple[StepResult, list[np.ndarray]]:
        runner = Runner(tiny.trunk, LoadedHead((tiny.head, tiny.head), "random"), compiles=True)
        run(runner, (reads(0), reads(1), reads(2)), PassShape())
        found = run(runner, (picks(0, (2, 8)), picks(1)), PassShape(num_rows, 3))
        slots = list(slots_from(runner, 2))
        runner.reset()
        return found, slots

    (alone, untouched), (beside, under) = answers(1), answers(SLOTS)
    assert alone == beside
    for was, now in zip(untouched, under, strict=True):
        np.testing.assert_array_equal(was, now)


def test_one_trace_serves_as_many_rows_as_it_has_room_for() -> None:
    runner = runner_of("llama")
    run(runner, (reads(0), reads(1), reads(2)), PassShape())
    traced = []
    for rows in ((picks(0),), (picks(0), picks(1)), (picks(0), picks(1), picks(2))):
        launched = runner.launch(StepPlan(SLOTS, CAPACITY, (), (rows,), (PassShape(4),)))
        runner.finish(launched)
        traced.append(launched.is_first_trace)
    assert traced == [True, True, False]  # greedy alone, then with a row at a temperature
    runner.reset()


def test_a_step_may_follow_one_with_more_ghosts_or_fewer() -> None:
    def tokens(counts: list[int]) -> list[tuple[int, ...]]:
        runner = runner_of("llama")
        run(runner, (reads(0), reads(1)), PassShape())
        rows = picks(0), picks(1)
        last = runner.launch(StepPlan(SLOTS, CAPACITY, (), (rows,), (PassShape(counts[0]),)))
        found: list[tuple[int, ...]] = []
        for step, count in enumerate(counts[1:]):
            follows = tuple(
                RowPlan(i, i, 10 + 4 * step, (-1,) * 4, 3, None, True, 3, row.params, (), 0)
                for i, row in enumerate(rows)
            )
            plan = StepPlan(SLOTS, CAPACITY, (), (follows,), (PassShape(count),), is_overlapped=True)
            following = runner.launch(plan, last)
            found += [row.token_ids for row in runner.finish(last).rows]
            last = following
        found += [row.token_ids for row in runner.finish(last).rows]
        runner.reset()
        return found

    assert tokens([1, 6, 3, 6, 1]) == tokens([1] * 5)


def test_what_a_ghost_picks_does_not_count() -> None:
    """The cells under it may hold anything, numbers that are none included."""
    runner = runner_of("llama")
    run(runner, (reads(0), reads(1), reads(2)), PassShape())
    for buffers in runner._buffers():
        buffers.put([_spoilt(array, 2) for array in buffers.arrays()])
    found = run(runner, (picks(0), picks(1)), PassShape(SLOTS))
    assert all(0 <= row.token_ids[0] < world("llama").vocab_size for row in found.rows)
    with pytest.raises(InvalidLogits):
        run(runner, (picks(0), picks(1), picks(2)), PassShape(SLOTS))
    runner.reset()


def _spoilt(array: mx.array, first: int) -> mx.array:
    array[first:] = mx.nan
    return array


def test_ghosts_stand_in_the_next_slots() -> None:
    assert not is_traceable((picks(1),))  # other rows than the first have none: their pass is not traced
    assert not padding_rows((picks(0),), 1)
    assert [(row.slot, row.sequence_id) for row in padding_rows((picks(0), picks(1)), 4)] == [
        (2, PADDING_ID),
        (3, PADDING_ID),
    ]
