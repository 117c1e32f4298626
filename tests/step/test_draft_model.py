"""A draft model drafts what it would answer itself; if it is the served model, every draft is right."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest

from outrider.models.draft_model import DraftModel
from outrider.plan import RowPlan, RowResult, StepPlan
from outrider.request import SamplingParams
from outrider.step.draft_model import DraftModelDrafter
from outrider.step.runner import Runner
from plan_rows import plan_row
from step.histories import world
from step.reference import mlx_lm_row, solo_answer
from tiny_models import tiny_model

CAPACITY = 96
DEPTH = 4
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40),
    SamplingParams(temperature=0.9, seed=7, max_tokens=40),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.9, seed=11, max_tokens=40),
]
PROMPTS = [[3, 1, 4], [(7 * i + i * i) % 90 for i in range(31)], [9, 2, 6, 5, 3, 5, 8]]


@pytest.fixture(autouse=True, scope="module")
def not_compiled() -> None:
    """As on CPUs: what would be traced is run as it is."""
    mx.disable_compile()


class Rows:
    """Rows that feed what was drafted for them."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.answers: list[list[int]] = [[] for _ in PROMPTS]
        self.drafts: list[Sequence[int]] = [() for _ in PROMPTS]

    def prefill(self, chunk: int) -> None:
        for slot, prompt in enumerate(PROMPTS):
            for start in range(0, len(prompt), chunk):
                end = min(start + chunk, len(prompt))
                row = plan_row(
                    prompt[:end],
                    params=PARAMS[slot],
                    slot=slot,
                    start=start,
                    feeds_head=True,
                    num_drafts_next=DEPTH if end == len(prompt) else 0,
                    next_id=prompt[end] if end < len(prompt) else None,
                )
                self._take(self._run([row]))

    def step(self) -> list[int]:
        """How many drafts each row has accepted."""
        rows = [
            plan_row(
                prompt,
                self.answers[slot],
                self.drafts[slot],
                params=PARAMS[slot],
                slot=slot,
                feeds_head=True,
                num_drafts_next=DEPTH,
            )
            for slot, prompt in enumerate(PROMPTS)
        ]
        found = self._run(rows)
        self._take(found)
        return [row.num_accepted for row in found]

    def _run(self, rows: list[RowPlan]) -> tuple[RowResult, ...]:
        return self._runner.run(StepPlan(len(PROMPTS), CAPACITY, (), (tuple(rows),))).rows

    def _take(self, found: Sequence[RowResult]) -> None:
        for row in found:
            self.answers[row.sequence_id] += row.token_ids
            self.drafts[row.sequence_id] = row.drafts


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5"])  # full, sliding, recurrent
@pytest.mark.parametrize("compiles", [False, True])
def test_every_draft_of_the_served_model_itself_is_accepted(family: str, compiles: bool) -> None:
    """Greedy and sampled: the draft model's cells, states, positions and noise are those of the trunk."""
    tiny = world(family)
    rows = Rows(Runner(tiny.trunk, DraftModel(tiny.trunk, "itself"), compiles=compiles))
    rows.prefill(chunk=5)
    assert [rows.step() for _ in range(4)] == [[DEPTH] * 3] * 4
    for prompt, params, answer in zip(PROMPTS, PARAMS, rows.answers, strict=True):
        alone = solo_answer(mlx_lm_row(tiny.model), prompt, params)
        assert tuple(answer) == alone.token_ids[: len(answer)]


def test_drafts_are_what_the_draft_model_would_answer_after_rejections() -> None:
    tiny, drafted = world("llama"), world("llama drafted by llama")
    loaded = drafted.drafters["whole"]
    assert isinstance(loaded, DraftModel)
    model = tiny_model("llama", num_hidden_layers=1, vocab_size=loaded.trunk.vocab_size, intermediate_size=32)
    rows = Rows(Runner(tiny.trunk, loaded))
    rows.prefill(chunk=7)
    num_rejected = 0
    for _ in range(5):
        before = [list(drafts) for drafts in rows.drafts]
        for slot, prompt in enumerate(PROMPTS):
            text = [min(i, loaded.trunk.vocab_size - 1) for i in (*prompt, *rows.answers[slot])]
            own = solo_answer(mlx_lm_row(model), text, PARAMS[slot])
            assert before[slot] == list(own.token_ids[:DEPTH])
        num_rejected += sum(DEPTH - num for num in rows.step())
    assert num_rejected > 10


def test_a_draft_model_stores_nothing_but_its_cells() -> None:
    loaded = world("llama drafted by llama").drafters["whole"]
    assert isinstance(loaded, DraftModel)
    drafter = DraftModelDrafter(loaded.trunk, vocab_size=113)
    own = sum(buffers.spec.bytes_per_cell for buffers in drafter.buffers())
    trunk_alone, both = Runner(world("llama").trunk), Runner(world("llama").trunk, loaded)
    assert both.geometry(16).bytes_per_cell == trunk_alone.geometry(16).bytes_per_cell + own
