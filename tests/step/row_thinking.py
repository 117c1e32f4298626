"""Thinking budgets for the rows of random histories, over tokens whose texts cut a marker in many ways.

The rule a second time, from the whole answer at once: nothing is counted on from token to token.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from outrider.answer_form import ReasoningMarks
from outrider.engine.allowed_tokens import AllowedTokens
from outrider.engine.draft_state import TokenGrammar
from outrider.engine.thinking_budget import ThinkingBudget, ThinkingRule
from outrider.request import SamplingParams
from step.row_bans import without_bans
from step.row_grammars import AllowedNow, compiler
from tiny_models import VOCAB_SIZE

TEXTS = ("a", "b", "ab", "ba", "\n", "c", " c", "aab", "")
OPENINGS = ("ab", "b", "aab", "c")
CLOSINGS = (("bb",), ("aba",), ("bbab", "cc"), ("bbbbb",), ("never",))


def token_text(token_id: int) -> str:
    return TEXTS[token_id % len(TEXTS)]


def with_random_thinking(rng: random.Random, params: SamplingParams, vocab_size: int) -> SamplingParams:
    """The same parameters with a thinking budget, unless their grammar begins at once."""
    forbidden = {i for i, bias in params.logit_bias.items() if bias == -math.inf} | set(params.stop_token_ids)
    free = [i for i in range(1, vocab_size) if i not in forbidden]
    after_ids = params.grammar.after_ids if params.grammar is not None else ()
    if params.grammar is not None and (not after_ids or forbidden & set(after_ids)):
        return params
    marks = ReasoningMarks(
        opening=rng.choice(OPENINGS),
        closings=rng.choice(CLOSINGS),
        close_ids=(*rng.sample(free, rng.randint(0 if after_ids else 1, 4)), *after_ids),
        banned_ids=() if after_ids else tuple(rng.sample(free, rng.choice((0, 1, 3)))),
        starts_inside=bool(after_ids) or rng.random() < 0.6,
        may_repeat=not after_ids and rng.random() < 0.3,
        splits_closing=rng.random() < 0.4,
    )
    if after_ids:  # the grammar begins where the reasoning ends, as the renderer sees to
        marks = replace(marks, closings=("".join(map(token_text, after_ids)) or "never",))
    budget = rng.choice((0, 1, 3, rng.randint(0, 25)))
    return replace(without_bans(params), reasoning=marks, thinking_token_budget=budget)


def row_grammar(params: SamplingParams, vocab_size: int) -> TokenGrammar | None:
    """As RequestValidator makes it."""
    grammar = None if params.grammar is None else compiler().new_row(params.grammar)
    if params.allowed_token_ids:
        return AllowedTokens(params.allowed_token_ids, vocab_size)
    if params.reasoning is None or params.thinking_token_budget is None:
        return grammar
    rule = ThinkingRule(params.reasoning, params.thinking_token_budget, token_text)
    return ThinkingBudget(rule, vocab_size, grammar)


# -- the rule from the whole answer ----------------------------------------------------------------------


def end_of_thinking(params: SamplingParams, answer: Sequence[int]) -> int | None:
    """The number of tokens after which the closing is forced; None: never, as far as the answer goes."""
    marks, budget = params.reasoning, params.thinking_token_budget
    if marks is None or budget is None:
        return None
    texts = [token_text(token_id) for token_id in answer]
    where = "inside" if marks.starts_inside else "before"
    text, thought = "", 0
    for num in range(len(answer) + 1):  # the first `num` tokens are there
        is_new = where == "inside" and num > 0
        text += texts[num - 1] if num else ""
        while True:  # markers of the new text
            if where == "before" and not marks.may_repeat:
                text = text.lstrip()
                if not text.startswith(marks.opening):
                    if not marks.opening.startswith(text):
                        return None
                    break
            if where == "before":
                if marks.opening not in text:
                    break
                text = text[text.index(marks.opening) + len(marks.opening) :]
                where, is_new = "inside", False
            ends = [text.index(closing) for closing in marks.closings if closing in text]
            if not ends:
                break
            if not marks.may_repeat:
                return None
            text, where, is_new = text[min(ends) :], "before", False
        thought += is_new
        if where == "inside" and thought >= budget:
            longest = max(map(len, marks.closings))
            starts = [closing[:i] for closing in marks.closings for i in range(1, len(closing))]
            is_cut = marks.splits_closing and thought < budget + longest
            if not (is_cut and any(text.endswith(start) for start in starts)):
                return num
    return None


def allowed_by_budget(params: SamplingParams) -> AllowedNow:
    def allowed(answer: Sequence[int]) -> np.ndarray | None:
        end = end_of_thinking(params, answer)
        if end is None or params.reasoning is None:
            return None
        close_ids, place = params.reasoning.close_ids, len(answer) - end
        if place < len(close_ids):
            return np.arange(VOCAB_SIZE) == close_ids[place]
        if place == len(close_ids):
            return ~np.isin(np.arange(VOCAB_SIZE), params.reasoning.banned_ids)
        return None

    return allowed


def both(one: AllowedNow, other: AllowedNow) -> AllowedNow:
    def allowed(answer: Sequence[int]) -> np.ndarray | None:
        masks = [mask for mask in (one(answer), other(answer)) if mask is not None]
        return None if not masks else np.logical_and.reduce(masks)

    return allowed


def fate_of_reasoning(params: SamplingParams, answer: Sequence[int]) -> str | None:
    """How the reasoning of an answer went; None: it had no budget."""
    if params.reasoning is None or params.thinking_token_budget is None:
        return None
    end = end_of_thinking(params, answer)
    if end is None:
        return "free"
    is_whole = len(answer) >= end + len(params.reasoning.close_ids)
    kind = "from the prompt" if params.reasoning.starts_inside else "opened by the model"
    return f"closed, {kind}" if is_whole else "cut off"
