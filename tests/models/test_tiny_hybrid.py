"""A small hybrid (Gated DeltaNet and attention) that was really trained together with its MTP head.

It is asked questions that its training never saw (recipes/tiny_hybrid). The engine counts what drafts gain,
and the answers must not depend on them.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.llm import Completion
from patience import in_test_or_soak

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests/data/tiny-hybrid"
QUESTIONS: list[str] = json.loads((FOLDER / "held_out_prompts.json").read_text())
ASKED = QUESTIONS[: in_test_or_soak(10, 24)]
Plain = dict[str, list[list[int]]]
GREEDY = SamplingParams(temperature=0, max_tokens=96, draft_depth=0)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=96, draft_depth=0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(FOLDER, drafter="mtp", max_rows=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain() -> Plain:
    """What the same model answers without its head, a question at a time."""
    with LLM(FOLDER, drafter="none", max_rows=1) as llm:
        asked = {"greedy": GREEDY, "sampled": SAMPLED}
        return {name: tokens(ask(llm, ASKED, params)) for name, params in asked.items()}


def ask(llm: LLM, questions: Sequence[str], params: SamplingParams) -> list[Completion]:
    return llm.chat([[{"role": "user", "content": question}] for question in questions], params)


def tokens(answers: Sequence[Completion]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def share_of_first_drafts(answers: Sequence[Completion]) -> float:
    drafted, accepted = (
        sum(getattr(one.stats, name)[0] for one in answers) for name in ("drafted", "accepted")
    )
    return accepted / drafted


def stride(answers: Sequence[Completion]) -> float:
    return sum(one.stats.num_generated for one in answers) / sum(one.stats.steps for one in answers)


def test_the_questions_were_held_out() -> None:
    spec = importlib.util.spec_from_file_location("tiny_hybrid_text", ROOT / "recipes/tiny_hybrid/text.py")
    assert spec is not None
    assert spec.loader is not None
    text = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(text)
    assert len(set(QUESTIONS)) == 24
    assert all(text.is_held_out(question) for question in QUESTIONS)


def test_the_checkpoint_is_small() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 3_000_000


@pytest.mark.soak
@pytest.mark.parametrize("depth", [2, 3])
def test_greedy_drafts_stand_and_change_nothing(llm: LLM, plain: Plain, depth: int) -> None:
    answers = ask(llm, ASKED, replace(GREEDY, draft_depth=depth))
    print(f"depth {depth}: first drafts {share_of_first_drafts(answers):.3f}, stride {stride(answers):.2f}")
    assert share_of_first_drafts(answers) > 0.5
    assert stride(answers) > 1.5
    assert tokens(answers) == plain["greedy"]


@pytest.mark.soak
def test_sampled_drafts_stand_and_change_nothing(llm: LLM, plain: Plain) -> None:
    answers = ask(llm, ASKED, replace(SAMPLED, draft_depth=3))
    print(f"sampled: first drafts {share_of_first_drafts(answers):.3f}, stride {stride(answers):.2f}")
    assert share_of_first_drafts(answers) > 0.35
    assert stride(answers) > 1.5
    assert tokens(answers) == plain["sampled"]
    assert plain["sampled"] != plain["greedy"]


def test_four_rows_of_uneven_lengths_answer_as_each_does_alone(llm: LLM) -> None:
    questions = [" ".join(ASKED[:1] * 9), ASKED[2], " ".join(ASKED[1:2] * 4), ASKED[7]]
    params = [
        SamplingParams(temperature=0.8 * (row % 2), seed=row, max_tokens=20 + 19 * row, draft_depth=depth)
        for row, depth in enumerate((3, 0, 2, 3))
    ]
    chats = [[{"role": "user", "content": question}] for question in questions]
    together = llm.chat(chats, params)
    alone = [llm.chat(chat, one) for chat, one in zip(chats, params, strict=True)]
    assert len({len(answer.prompt_token_ids) for answer in together}) == 4
    assert tokens(together) == tokens(alone)


def test_it_answers_in_the_form_that_was_asked_for(llm: LLM) -> None:
    """The model is small and mixes up names, but it knows what a record and a function look like."""
    record, function = ask(llm, [ASKED[1], ASKED[4]], replace(GREEDY, draft_depth=2))
    assert list(json.loads(record.text)) == ["name", "age", "city", "email", "likes", "active"]
    number = re.search(r"\d+", ASKED[4])
    assert number is not None
    assert f"_{number[0]}(" in function.text
    assert record.finish_reason == function.finish_reason == "stop"
