"""Held-out acceptance as training measures it is what the engine then does, to the token.

An error by one in a position, in the recursion or in the simulated steps would show here.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from conftest import Trained
from outrider import LLM, SamplingParams
from outrider.llm import Completion
from outrider.models import heads, loader
from outrider.models.loader import LoadedModel
from outrider.train.evaluate import Acceptance, evaluate, simulate_steps
from outrider.train.exchanges import Exchange

QUESTIONS = ["abc", "hello", "what is new", "z", "tell me something about bread", "q q q", "why", "and then"]


@pytest.fixture(scope="module")
def llm(trained: Trained) -> Iterator[LLM]:
    with LLM(trained.folder, max_rows=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def loaded(trained: Trained) -> LoadedModel:
    return loader.load(trained.folder)


def _answers(llm: LLM, depth: int, max_tokens: int) -> list[Completion]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, draft_depth=depth)
    return llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], params)


def _counted(answers: list[Completion], depth: int) -> Acceptance:
    """What the engine counted. A request's first step is its prefill, which drafts for the next."""
    total = Acceptance(0, (0,) * depth, (0,) * depth)
    for one in answers:
        padding = [0] * (depth - len(one.stats.drafted))
        drafted, accepted = one.stats.drafted + padding, one.stats.accepted + padding
        total = total.plus(Acceptance(one.stats.steps - 1, drafted, accepted))
    return total


def _exchanges(answers: list[Completion]) -> list[Exchange]:
    return [
        Exchange(one.prompt_token_ids, one.token_ids, one.finish_reason == "stop", True) for one in answers
    ]


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_measured_acceptance_is_the_engines(
    llm: LLM, loaded: LoadedModel, trained: Trained, depth: int
) -> None:
    answers = _answers(llm, depth, max_tokens=37)
    counted = _counted(answers, depth)
    head = heads.load_head(trained.head, loaded.trunk)
    measured = evaluate(head.layers[0], loaded.trunk, _exchanges(answers), depth, head.draft_ids)
    assert measured == counted
    assert counted.accepted[0] > 20


def test_answers_that_end_by_themselves_are_counted_alike(
    llm: LLM, loaded: LoadedModel, trained: Trained
) -> None:
    answers = [one for one in _answers(llm, 3, max_tokens=180) if one.finish_reason == "stop"]
    assert answers
    head = heads.load_head(trained.head, loaded.trunk)
    measured = evaluate(head.layers[0], loaded.trunk, _exchanges(answers), 3, head.draft_ids)
    assert measured == _counted(answers, 3)


def test_the_draft_vocabulary_is_honoured(loaded: LoadedModel, trained: Trained, llm: LLM) -> None:
    exchanges = _exchanges(_answers(llm, 3, max_tokens=37))
    head = heads.load_head(trained.head, loaded.trunk)
    useless = mx.array([1, 2])  # special tokens, which no answer holds
    assert sum(evaluate(head.layers[0], loaded.trunk, exchanges, 3, useless).accepted) == 0


@pytest.mark.parametrize(
    ("hits", "is_finished", "want"),
    [
        # one row a target, one column a depth; the answer has one token more than targets
        ([[1, 1], [1, 1], [1, 1], [1, 1]], False, Acceptance(2, (1, 1), (1, 1))),
        ([[1, 1], [1, 1], [1, 1], [1, 1]], True, Acceptance(2, (2, 2), (2, 1))),
        ([[0, 1], [0, 1], [0, 1], [0, 1]], True, Acceptance(4, (4, 4), (0, 0))),
        ([[1, 0], [1, 0], [1, 0], [1, 0]], True, Acceptance(2, (2, 2), (2, 0))),
        ([[1, 1]], False, Acceptance(1, (0, 0), (0, 0))),
        ([[1, 1]], True, Acceptance(1, (1, 1), (1, 0))),
    ],
)
def test_the_walk_over_an_answer(hits: list[list[int]], is_finished: bool, want: Acceptance) -> None:
    exchange = Exchange((1,), tuple(range(len(hits) + 1)), is_finished, True)
    assert simulate_steps(exchange, np.array(hits, bool)) == want
