"""The thinking budget of a row: forced once, cleanly, at every position as it would really be."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from outrider.answer_form import ReasoningMarks
from outrider.engine.draft_planner import needs_host
from outrider.engine.draft_state import DraftState
from outrider.engine.sequence import Sequence
from outrider.engine.thinking_budget import TWO_STEPS, ThinkingBudget, ThinkingRule
from outrider.request import MAX_DEPTH, Request, SamplingParams
from step.row_thinking import allowed_by_budget, row_grammar, with_random_thinking
from tiny_models import VOCAB_SIZE

# Texts of tokens: a vocabulary in which the markers are tokens, and can be spelt as well.
TEXTS = ["x", "<think>", "</think>", "\n", "\n\n", "<", "/", "think", ">", "y"]
X, OPEN, CLOSE, LINE, BLANK, LESS, SLASH, THINK, MORE, Y = range(10)
THINK_MARKS = ReasoningMarks(
    "<think>", ("</think>",), close_ids=(LINE, CLOSE, BLANK), banned_ids=(OPEN,), starts_inside=True
)


def budget_of(num: int, marks: ReasoningMarks = THINK_MARKS) -> ThinkingBudget:
    return ThinkingBudget(ThinkingRule(marks, num, TEXTS.__getitem__), len(TEXTS))


def allowed(budget: ThinkingBudget, drafts: tuple[int, ...] = ()) -> list[set[int]]:
    """The allowed tokens at each position."""
    masks = budget.masks(drafts)
    if masks is None:
        return [set(range(len(TEXTS)))] * (1 + len(drafts))
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, : len(TEXTS)]
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def commit(budget: ThinkingBudget, *token_ids: int) -> None:
    for token_id in token_ids:
        assert token_id in allowed(budget)[0]
        budget.commit(token_id)


FREE = set(range(len(TEXTS)))


def test_the_closing_is_forced_at_the_budget_and_the_block_cannot_be_opened_again() -> None:
    budget = budget_of(2)
    assert not budget.is_restricting
    commit(budget, X, X)
    assert budget.is_restricting
    assert allowed(budget) == [{LINE}]
    assert budget.forced(8) == [LINE, CLOSE, BLANK]
    assert allowed(budget, (LINE, CLOSE, BLANK)) == [{LINE}, {CLOSE}, {BLANK}, FREE - {OPEN}]
    commit(budget, LINE, CLOSE, BLANK)
    assert allowed(budget) == [FREE - {OPEN}]
    commit(budget, X)
    assert not budget.needs_host
    for token_id in (OPEN, X, X, X, X, CLOSE, OPEN, X):  # never twice
        commit(budget, token_id)
        assert allowed(budget) == [FREE]


def test_a_block_that_the_model_opens_itself_has_the_same_budget() -> None:
    budget = budget_of(2, replace(THINK_MARKS, starts_inside=False))
    commit(budget, BLANK, OPEN, X, X)
    assert allowed(budget) == [{LINE}]
    spelt = budget_of(2, replace(THINK_MARKS, starts_inside=False))
    commit(spelt, LESS, THINK, MORE, X, X)
    assert allowed(spelt) == [{LINE}]


def test_reasoning_that_the_model_ends_in_time_is_left_alone() -> None:
    budget = budget_of(3)
    commit(budget, X, X, CLOSE, X, X, X, X)
    assert allowed(budget) == [FREE]
    assert not budget.needs_host


def test_an_answer_without_reasoning_is_left_alone() -> None:
    budget = budget_of(0, replace(THINK_MARKS, starts_inside=False))
    commit(budget, BLANK, X, OPEN, X, X)  # later the marker is plain text, as the parser of the answer has it
    assert allowed(budget) == [FREE]
    assert not budget.needs_host


def test_a_budget_of_zero_closes_the_block_at_its_first_token() -> None:
    assert allowed(budget_of(0)) == [{LINE}]
    opened = budget_of(0, replace(THINK_MARKS, starts_inside=False))
    assert allowed(opened, (OPEN, LINE)) == [FREE, {LINE}, {CLOSE}]


def test_a_draft_is_followed_as_if_it_were_committed() -> None:
    budget = budget_of(3)
    assert allowed(budget, (X, X, X, LINE)) == [FREE, FREE, FREE, {LINE}, {CLOSE}]
    assert allowed(budget, (X, CLOSE, X, X, X)) == [FREE] * 6
    assert budget.num_allowed((X, X, X, X, X)) == 3
    assert budget.num_allowed((X, X, X, LINE, CLOSE, BLANK, OPEN)) == 6
    assert allowed(budget) == [FREE]  # nothing was committed


def test_a_closing_of_several_tokens_is_not_cut_off() -> None:
    marks = replace(THINK_MARKS, splits_closing=True)
    budget = budget_of(2, marks)
    commit(budget, X, LESS)
    assert allowed(budget) == [FREE]  # it may be "</think>"
    commit(budget, SLASH, THINK, MORE)
    assert allowed(budget) == [FREE]
    assert not budget.needs_host
    other = budget_of(2, marks)
    commit(other, X, LESS, X)
    assert allowed(other) == [{LINE}]
    endless = budget_of(2, marks)
    num = 0
    while allowed(endless) == [FREE]:
        commit(endless, LESS)
        num += 1
    assert num == 2 + len("</think>")


def test_reasoning_in_several_blocks_shares_one_budget() -> None:
    """Harmony: analysis, a message to the user, analysis again."""
    budget = budget_of(3, replace(THINK_MARKS, may_repeat=True))
    commit(budget, X, X, CLOSE, X, X, X, OPEN, X)
    assert allowed(budget) == [{LINE}]
    commit(budget, LINE, CLOSE, BLANK, X, OPEN, X, X, X, X)
    assert allowed(budget) == [FREE]


def test_the_host_is_needed_only_near_the_budget() -> None:
    """A step that is launched before the one in front is read must not reach a forced position."""
    marks = replace(THINK_MARKS, starts_inside=False)
    budget = budget_of(100, marks)
    params = SamplingParams(thinking_token_budget=100, reasoning=marks)
    row = Sequence(
        0, Request("r", (1,), params), None, frozenset(), 500, DraftState(max_depth=MAX_DEPTH, grammar=budget)
    )  # type: ignore[arg-type]
    assert not needs_host(row, can_roll_back=False)
    commit(budget, OPEN, *[X] * (100 - TWO_STEPS))
    assert not needs_host(row, can_roll_back=False)
    assert allowed(budget, (X,) * (TWO_STEPS - 1)) == [FREE] * TWO_STEPS  # two steps with all their drafts
    commit(budget, X)
    assert needs_host(row, can_roll_back=False)
    commit(budget, *[X] * (TWO_STEPS - 1), LINE, CLOSE, BLANK)
    assert needs_host(row, can_roll_back=False)
    commit(budget, X)
    assert not needs_host(row, can_roll_back=False)


class Only:
    """A grammar that allows the same tokens everywhere."""

    needs_host = True

    def __init__(self, *token_ids: int) -> None:
        self._ids = token_ids
        self.committed: list[int] = []

    def commit(self, token_id: int) -> None:
        self.committed.append(token_id)

    def num_allowed(self, drafts: tuple[int, ...]) -> int:
        return len(list(itertools.takewhile(self._ids.__contains__, drafts)))

    def masks(self, drafts: tuple[int, ...]) -> np.ndarray:
        words = np.zeros((1 + len(drafts), 2), np.uint32)  # wider than the vocabulary
        words[:, 0] = sum(1 << token_id for token_id in self._ids)
        words[:, 1] = 0xFFFFFFFF
        return words

    def forced(self, most: int) -> list[int]:
        return []


def test_a_token_has_to_satisfy_the_grammar_and_the_budget() -> None:
    grammar = Only(X, LINE, CLOSE, BLANK)
    budget = ThinkingBudget(ThinkingRule(THINK_MARKS, 1, TEXTS.__getitem__), len(TEXTS), grammar)
    masks = budget.masks((X, LINE))
    assert masks is not None
    both = 1 | 1 << LINE | 1 << CLOSE | 1 << BLANK
    assert masks.tolist() == [[both, 0xFFFFFFFF], [1 << LINE, 0], [1 << CLOSE, 0]]
    assert budget.num_allowed((X, LINE, Y)) == 2
    budget.commit(X)
    assert budget.forced(8) == [LINE, CLOSE, BLANK]
    for token_id in (LINE, CLOSE, BLANK):
        budget.commit(token_id)
    assert grammar.committed == [X, LINE, CLOSE, BLANK]
    assert allowed(budget) == [{X, LINE, CLOSE, BLANK}]


@pytest.mark.parametrize("held_by", [(X,), (X, LINE), (LINE, LESS, BLANK)])
def test_the_end_waits_for_a_grammar_that_holds_the_row(held_by: tuple[int, ...]) -> None:
    """A call inside the reasoning: it is not cut off, and the end is forced after it, once."""
    grammar = Only(*held_by)
    budget = ThinkingBudget(ThinkingRule(THINK_MARKS, 1, TEXTS.__getitem__), len(TEXTS), grammar)
    budget.commit(X)
    for token_id in 2 * held_by:
        assert allowed(budget) == [set(held_by)]
        assert budget.num_allowed((token_id, X)) == 0
        assert budget.forced(8) == []
        budget.commit(token_id)
    grammar._ids = tuple(FREE)  # the call is over
    assert allowed(budget) == [{LINE}]
    assert budget.forced(8) == [LINE, CLOSE, BLANK]
    for token_id in (LINE, CLOSE, BLANK, X):
        budget.commit(token_id)
    assert allowed(budget) == [FREE]


def test_a_token_against_the_mask_is_a_fault() -> None:
    budget = budget_of(0)
    with pytest.raises(RuntimeError, match="was forced"):
        budget.commit(X)


def test_every_position_is_restricted_as_the_rule_says() -> None:
    """Random budgets, markers, tokenisations and drafts, against the rule from the whole answer."""
    num_forced = 0
    for seed in range(1500):
        rng = random.Random(seed)
        params = with_random_thinking(rng, SamplingParams(), VOCAB_SIZE)
        budget, rule = row_grammar(params, VOCAB_SIZE), allowed_by_budget(params)
        assert budget is not None
        answer: list[int] = []
        while len(answer) < 40:
            drafts = _drafts(rng, rule, answer)
            drafts = drafts[: budget.num_allowed(drafts)]
            masks = budget.masks(drafts)
            expected = [rule([*answer, *drafts[:i]]) for i in range(len(drafts) + 1)]
            num_forced += sum(mask is not None for mask in expected)
            if masks is None:
                assert all(mask is None or mask.all() for mask in expected)
            else:
                bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB_SIZE]
                for row, mask in zip(bits, expected, strict=True):
                    assert (row.astype(bool) == (True if mask is None else mask)).all()
            for token_id in (*drafts, _pick(rng, rule, [*answer, *drafts])):
                budget.commit(token_id)
                answer.append(token_id)
    assert num_forced > 2000


def _pick(rng: random.Random, rule, answer: list[int]) -> int:  # type: ignore[no-untyped-def]
    mask = rule(answer)
    return rng.choice(range(VOCAB_SIZE) if mask is None else np.flatnonzero(mask).tolist())


def _drafts(rng: random.Random, rule, answer: list[int]) -> list[int]:  # type: ignore[no-untyped-def]
    """Right ones up to a random place, then any."""
    drafts: list[int] = []
    num_right = rng.randint(0, MAX_DEPTH)
    for i in range(rng.randint(0, MAX_DEPTH)):
        right = _pick(rng, rule, [*answer, *drafts])
        drafts.append(right if i < num_right else rng.randrange(VOCAB_SIZE))
    return drafts
