"""Every field of a request is checked at the door, whatever was put into it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.answer_form import Grammar, ReasoningMarks
from outrider.request import InvalidRequest, SamplingParams, SpecPrefill

NAN, INF, HUGE = math.nan, math.inf, 10**400  # HUGE: an integer that no float holds

REFUSED: dict[str, list[Any]] = {
    "max_tokens": [0, -1, True, 1.5, "5", NAN, INF, [5]],
    "min_tokens": [-1, 257, True, None, 1.5, "5", [5]],
    "temperature": [-0.1, 100.1, NAN, INF, -INF, HUGE, True, None, "hot", [1.0]],
    "top_k": [-1, 1.5, True, None, "5", NAN, [5]],
    "top_p": [0, -0.1, 1.1, NAN, INF, HUGE, True, None, "1", [0.5]],
    "min_p": [-0.1, 1.1, NAN, INF, HUGE, True, None, "0", [0.5]],
    "repetition_penalty": [0, -1, 1e-30, 1e30, NAN, INF, HUGE, True, None, "1", [1.0]],
    "presence_penalty": [-2.1, 2.1, NAN, INF, HUGE, True, None, "0", [0.0]],
    "frequency_penalty": [-2.1, 2.1, NAN, INF, HUGE, True, None, "0", [0.0]],
    "logit_bias": [
        None,
        5,
        "ab",
        [(1, 1.0)],
        {1: NAN},
        {1: INF},
        {1: 1e300},
        {1: HUGE},
        {1: -HUGE},
        {1: None},
        {1: "1"},
        {1: True},
        {-1: 1.0},
        {"1": 1.0},
        {True: 1.0},
        {1.0: 1.0},
        {None: 1.0},
    ],
    "seed": [2**64, -(2**63) - 1, 1.5, True, "5", NAN, [5]],
    "stop": ["", [""], ["a", ""], [None], [5], 5, 1.5, True, b"ab", [b"ab"], {"a": 1}, {"a"}, object()],
    "stop_token_ids": [None, 5, "5", b"5", [-1], ["5"], [1.5], [True], [None], {5}, {5: 5}, object()],
    "include_stop_str_in_output": [None, 0, 1, "yes", []],
    "truncate_prompt_tokens": [0, -2, 1.5, True, "5", NAN, [5]],
    "allowed_token_ids": [None, 5, "5", b"5", [-1], ["5"], [1.5], [True], [None], {5}, object()],
    "bad_words": [None, 5, "word", b"word", [""], [" "], [5], [None], {"a"}],
    "bad_word_ids": [None, 5, "5", [5], ["5"], [[]], [[-1]], [["5"]], [[True]], {(1,)}],
    "logits_processors": [None, 5, "f", len, [5], ["f"], [None], {len}],
    "ignore_eos": [None, 0, 1, "yes", []],
    "logprobs": [-1, 21, 1.5, True, "5", NAN, [5]],
    "prompt_logprobs": [-1, 21, 1.5, True, "5", NAN, [5]],
    "skip_special_tokens": [None, 0, 1, "yes", []],
    "token_origins": [None, 0, 1, "yes", []],
    "prompt_progress": [None, 0, 1, "yes", []],
    "thinking_token_budget": [-1, 1.5, True, "5", NAN, [5]],
    "reasoning": [5, "think", {"opening": "<think>"}, True],
    "grammar": [5, "json", {"type": "object"}, True, ["a"]],
    "cache_salt": [None, 5, b"x", ["x"]],
    "tenant": [None, 5, b"x", ["x"]],
    "priority": [None, 1001, -1001, 1.5, True, "1", NAN, [1]],
    "adapter": [5, True, b"x", ["x"]],
    "spec_prefill": [0.3, True, {"keep": 0.3}, "self"],
    "prediction_ids": [None, 5, "5", b"5", [-1], ["5"], [1.5], [True], [None], {5}, {5: 5}, object()],
    "draft_depth": [-1, 9, True, False, None, 2.0, NAN, "2", "automatic", "", [2], INF, HUGE],
}

ACCEPTED: dict[str, list[Any]] = {
    "max_tokens": [1, 10**9, None],
    "min_tokens": [0, 1, 256],
    "temperature": [0, 0.0, 1e-8, 1, 100],
    "top_k": [0, 1, 10**9],
    "top_p": [1e-6, 0.5, 1, 1.0],
    "min_p": [0, 0.5, 1],
    "repetition_penalty": [0.01, 1, 1.3, 100],
    "presence_penalty": [-2, 0, 2.0],
    "frequency_penalty": [-2, 0, 2.0],
    "logit_bias": [{}, {0: 1}, {5: -100.0, 6: 100}, {5: -INF}, {5: -1e9}],
    "seed": [None, 0, -1, 2**64 - 1, -(2**63)],
    "stop": [None, "a", [], ["a"], ("a", "\n\n")],
    "stop_token_ids": [[], (), [0], (1, 2)],
    "include_stop_str_in_output": [True, False],
    "truncate_prompt_tokens": [None, -1, 1, 10**9],
    "allowed_token_ids": [[], (), [0], (1, 2)],
    "bad_words": [[], (), ["a"], ("a", " b c")],
    "bad_word_ids": [[], (), [[0]], ((1, 2), [3])],
    "logits_processors": [[], (), [max], (max, min)],
    "ignore_eos": [True, False],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 20],
    "skip_special_tokens": [True, False],
    "token_origins": [True, False],
    "prompt_progress": [True, False],
    "thinking_token_budget": [None, 0, 10**9],
    "reasoning": [None, ReasoningMarks("<think>", ("</think>",), (1,))],
    "grammar": [None, Grammar("json_object")],
    "prediction_ids": [[], (), [0], (1, 2)],
    "cache_salt": ["", "anything"],
    "tenant": ["", "alice"],
    "priority": [-1000, 0, 1000],
    "adapter": [None, "sql"],
    "spec_prefill": [None, SpecPrefill(0.3), SpecPrefill(1)],
    "draft_depth": ["auto", 0, 1, 8],
}


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}-{i}") for name in table for i, value in enumerate(table[name])
    ]


@pytest.mark.parametrize(("name", "value"), cases(REFUSED))
def test_refused_with_the_name_of_the_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), cases(ACCEPTED))
def test_accepted_as_it_is(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_the_tables_name_every_field() -> None:
    assert set(REFUSED) == set(ACCEPTED) == set(SamplingParams.__dataclass_fields__)


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.one_of(st.integers(), st.text(max_size=2), st.none()), max_size=3),
    st.dictionaries(
        st.one_of(st.integers(), st.text(max_size=2)), st.one_of(st.floats(), st.text()), max_size=3
    ),
)


@given(st.dictionaries(st.sampled_from(sorted(ACCEPTED)), anything, max_size=4))
@settings(max_examples=500, deadline=None)
def test_whatever_comes_is_accepted_or_refused_and_never_another_error(fields: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**fields)
    except InvalidRequest:
        return
    assert params.max_tokens is None or params.min_tokens <= params.max_tokens
    assert all(params.stop_strings)


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens \(6\) is larger than max_tokens \(5\)"):
        SamplingParams(min_tokens=6, max_tokens=5)
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=10**6, max_tokens=None).min_tokens == 10**6


def test_two_unseeded_requests_get_different_seeds() -> None:
    params = SamplingParams()
    seeds = {params.with_seed().seed for _ in range(100)}
    assert len(seeds) == 100
    assert None not in seeds
    assert params.seed is None


@pytest.mark.parametrize("seed", [0, 5, -1])
def test_given_seed_stays(seed: int) -> None:
    params = SamplingParams(seed=seed, top_k=7)
    assert params.with_seed() == params


def test_fresh_seed_changes_nothing_else() -> None:
    params = SamplingParams(temperature=0.3, stop=["a"], logit_bias={1: 2.0}, draft_depth=3)
    seeded = params.with_seed()
    assert SamplingParams(**{**vars(seeded), "seed": None}) == params


@pytest.mark.parametrize(
    ("stop", "strings"), [(None, ()), ("ab", ("ab",)), (["a", "b"], ("a", "b")), ([], ())]
)
def test_stop_strings_are_always_a_tuple(stop: Any, strings: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop_strings == strings


@pytest.mark.parametrize(
    ("name", "off", "on"),
    [
        ("is_greedy", {"temperature": 0.1}, {"temperature": 0}),
        ("is_filtered", {}, {"top_k": 1}),
        ("is_filtered", {}, {"top_p": 0.9}),
        ("is_filtered", {}, {"min_p": 0.1}),
        ("has_penalties", {"logit_bias": {1: 1.0}}, {"repetition_penalty": 1.1}),
        ("has_penalties", {}, {"presence_penalty": -0.1}),
        ("has_penalties", {}, {"frequency_penalty": 0.1}),
    ],
)
def test_what_a_row_needs(name: str, off: dict[str, Any], on: dict[str, Any]) -> None:
    assert not getattr(SamplingParams(**off), name)
    assert getattr(SamplingParams(**on), name)
