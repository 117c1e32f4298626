"""Functions of the user: what they are called with, and what an error of theirs does."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from outrider.plan import RowPlan
from outrider.request import LogitsProcessor, SamplingParams
from outrider.sampling.custom_processors import CustomProcessors
from plan_rows import plan_row

VOCAB = 11
PLAIN = SamplingParams()


def row(*functions: LogitsProcessor, drafts: tuple[int, ...] = (7, 8), slot: int = 0) -> RowPlan:
    return plan_row([1, 2], [3], drafts, params=SamplingParams(logits_processors=functions), slot=slot)


def applied(*rows: RowPlan) -> tuple[np.ndarray, np.ndarray, dict[int, tuple[int, str]]]:
    """The logits before and after, and the errors."""
    logits = mx.random.normal((len(rows), 3, VOCAB), key=mx.random.key(0))
    before = np.array(logits)
    custom = CustomProcessors.of(rows)
    assert custom is not None
    found, errors = custom.apply(logits)
    assert np.array_equal(np.array(logits), before)  # log-probabilities are read from them
    return before, np.array(found), {i: (error.position, error.message) for i, error in errors.items()}


def test_rows_without_functions_need_none() -> None:
    assert CustomProcessors.of([plan_row([1], params=PLAIN)]) is None


def test_each_position_has_the_drafts_before_it() -> None:
    calls = []

    def noted(tokens: mx.array, logits: mx.array) -> mx.array:
        calls.append((tokens.tolist(), np.array(logits)))
        return logits + len(tokens)

    before, found, errors = applied(plan_row([4], [5], params=PLAIN), row(noted, slot=1))
    assert [tokens for tokens, _ in calls] == [[1, 2, 3], [1, 2, 3, 7], [1, 2, 3, 7, 8]]
    for position, (_, logits) in enumerate(calls):
        assert np.array_equal(logits, before[1:2, position])
    np.testing.assert_allclose(found[1], before[1] + np.array([[3], [4], [5]]), rtol=1e-6)
    assert np.array_equal(found[0], before[0])
    assert not errors


def test_functions_are_called_one_after_the_other() -> None:
    def in_place(tokens: mx.array, logits: mx.array) -> mx.array:
        logits[:, 3] = 5.0
        return logits

    _, found, _ = applied(row(in_place, lambda tokens, logits: logits * 2, drafts=()))
    assert found[0, 0, 3] == 10.0


def test_an_error_is_that_of_the_first_position_where_it_happens() -> None:
    num_calls = 0

    def fails_after_a_draft(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal num_calls
        num_calls += 1
        if len(tokens) > 3:
            raise KeyError("seven")
        return logits + 1

    before, found, errors = applied(row(fails_after_a_draft), plan_row([4], [5], params=PLAIN, slot=1))
    assert errors == {0: (1, "a logits processor failed: KeyError: 'seven'")}
    assert num_calls == 2
    np.testing.assert_allclose(found[0, 0], before[0, 0] + 1, rtol=1e-6)
    assert np.array_equal(found[1], before[1])


@pytest.mark.parametrize(
    ("given", "shown"),
    [(None, "None"), (mx.zeros(VOCAB), "(11,)"), (mx.zeros((1, 3)), "(1, 3)"), ([1.0], "[1.0]")],
)
def test_a_result_of_another_shape_is_an_error(given: object, shown: str) -> None:
    _, _, errors = applied(row(lambda tokens, logits: given))
    assert errors[0][0] == 0
    assert shown in errors[0][1]
    assert "(1, 11)" in errors[0][1]


@pytest.mark.parametrize("bad", [mx.nan, mx.inf])
def test_a_result_with_nan_or_infinity_excludes_every_token(bad: float) -> None:
    def spoilt(tokens: mx.array, logits: mx.array) -> mx.array:
        logits[:, 2] = bad
        return logits

    _, found, errors = applied(row(spoilt, drafts=()))
    assert np.isneginf(found[0, 0]).all()
    assert not errors
