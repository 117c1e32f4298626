"""A head that rested drafts as if it had always been fed; a padded pass gives what a narrow one gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from outrider.plan import Move, PassShape, RowPlan, RowResult, StepPlan
from outrider.request import SamplingParams
from outrider.step.runner import Runner
from plan_rows import plan_row
from step.histories import World, world
from step.reference import mlx_lm_row, solo_answer

CAPACITY = 96
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40),
    SamplingParams(temperature=0.9, seed=7, max_tokens=40),
    SamplingParams(temperature=0, max_tokens=40),
]


@pytest.fixture(scope="module", params=["llama", "qwen3", "llama drafted by llama"])
def tiny(request: pytest.FixtureRequest) -> World:
    return world(request.param)


@pytest.fixture
def runner(tiny: World) -> Iterator[Runner]:
    runner = tiny.runners["whole"]
    runner.reset()
    yield runner
    runner.reset()


class Rows:
    """Three rows of different lengths that decode side by side."""

    def __init__(self, tiny: World, runner: Runner) -> None:
        self.runner = runner
        rng = np.random.default_rng(8)
        self.prompts = [rng.integers(0, tiny.vocab_size, length).tolist() for length in (3, 11, 20)]
        self.answers = [
            list(solo_answer(mlx_lm_row(tiny.model), prompt, params).token_ids)
            for prompt, params in zip(self.prompts, PARAMS, strict=True)
        ]
        self.gained = [0, 0, 0]
        self.headed = [len(prompt) for prompt in self.prompts]
        self.slots = [0, 1, 2]
        self._run([self._row(i, 0, 0, start=0) for i in range(3)])

    def step(
        self,
        defers_head: set[int],
        depths: tuple[int, int, int],
        rights: tuple[int, int, int],
        width: int = 1,
    ) -> list[list[int]]:
        """Feed so many right drafts and a wrong one; the drafts that the head makes."""
        rows = [
            self._row(i, rights[i], 0 if i in defers_head else depths[i], defers_head=i in defers_head)
            for i in range(3)
        ]
        found = self._run(rows, width)
        for i in range(3):
            if i not in defers_head:
                self.headed[i] = len(self.prompts[i]) + self.gained[i] - 1
        return [list(row.drafts) for row in found]

    def _row(
        self, i: int, num_right: int, depth: int, start: int | None = None, defers_head: bool = False
    ) -> RowPlan:
        text = self.answers[i]
        right = text[self.gained[i] : self.gained[i] + num_right]
        drafts = [*right, (text[self.gained[i] + num_right] + 1) % 50] if num_right else []
        row = plan_row(
            self.prompts[i],
            text[: self.gained[i]],
            drafts,
            params=PARAMS[i],
            slot=self.slots[i],
            start=start,
            feeds_head=not defers_head,
            num_drafts_next=depth,
        )
        head_start = None if start is not None else self.headed[i]
        return replace(row, sequence_id=i, head_start=head_start, defers_head=defers_head)

    def _run(
        self, rows: list[RowPlan], width: int = 1, moves: tuple[Move, ...] = ()
    ) -> tuple[RowResult, ...]:
        found = self.runner.run(StepPlan(4, CAPACITY, moves, (tuple(rows),), (PassShape(width=width),))).rows
        for i, row in enumerate(found):
            gained = len(row.token_ids)
            assert list(row.token_ids) == self.answers[i][self.gained[i] : self.gained[i] + gained]
            self.gained[i] += gained
        return found


def play(tiny: World, runner: Runner, resting: list[set[int]], width: int = 1) -> list[list[list[int]]]:
    """The drafts of every step, for rows that rest in some of them."""
    runner.reset()
    rows = Rows(tiny, runner)
    rights = [(0, 0, 0), (2, 0, 1), (0, 3, 0), (1, 1, 1), (0, 0, 2), (0, 0, 0)]
    return [rows.step(rests, (4, 2, 8), right, width) for rests, right in zip(resting, rights, strict=True)]


@pytest.mark.parametrize(
    "resting",
    [
        [{0, 1, 2}] * 5 + [set()],
        [{1}] * 5 + [set()],
        [{0}, {0, 1}, {0, 1}, {1, 2}, {1, 2}, set()],
        [{0, 2}, {0}, set(), {2}, set(), set()],
    ],
)
def test_a_head_that_rested_drafts_as_if_it_had_been_fed(
    tiny: World, runner: Runner, resting: list[set[int]]
) -> None:
    always = play(tiny, runner, [set()] * 6)
    found = play(tiny, runner, resting)
    for step, defers_head in enumerate(resting):
        for row in {0, 1, 2} - defers_head:
            assert found[step][row] == always[step][row]


def test_a_padded_pass_gives_what_a_narrow_one_gives(tiny: World, runner: Runner) -> None:
    assert play(tiny, runner, [set()] * 6, width=9) == play(tiny, runner, [set()] * 6)


def test_states_of_a_resting_head_move_with_their_row(tiny: World, runner: Runner) -> None:
    always = play(tiny, runner, [set()] * 6)
    runner.reset()
    rows = Rows(tiny, runner)
    rights = [(0, 0, 0), (2, 0, 1), (0, 3, 0)]
    for right in rights:
        rows.step({0, 1, 2}, (4, 2, 8), right)
    rows.slots = [2, 1, 0]
    moved = (Move(0, 2, one_way=False),)
    found = rows._run([rows._row(i, 1, (4, 2, 8)[i]) for i in range(3)], moves=moved)
    assert [list(row.drafts) for row in found] == always[3]
