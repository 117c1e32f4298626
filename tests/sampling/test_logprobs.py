"""Log-probabilities: the model's own, for those who ask, one entry a committed token."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import sampling_oracle as oracle
from outrider.request import SamplingParams
from outrider.sampling.logprobs import LogprobRequest, compute_logprobs, read_logprobs
from outrider.step.verify import SamplingBatch
from plan_rows import plan_row

VOCAB = 50
pytestmark = pytest.mark.usefixtures("both_ways")


def rows_asking(*wanted: int | None) -> list:
    return [plan_row([1], params=SamplingParams(logprobs=num), slot=slot) for slot, num in enumerate(wanted)]


def logprobs_of(
    logits: np.ndarray,
    targets: np.ndarray,
    wanted: list[int | None],
    num_tokens: list[int],
    merged: bool = False,
) -> dict:
    rows = rows_asking(*wanted)
    asked = LogprobRequest.of(rows, logits.shape[-1], merged)
    assert asked is not None
    found = compute_logprobs(mx.array(logits), mx.array(targets), asked)
    return read_logprobs(found, rows, [targets[i, :num].tolist() for i, num in enumerate(num_tokens)])


def random_case(num_rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(num_rows)
    logits = (5 * numbers.standard_normal((num_rows, width, VOCAB))).astype(np.float32)
    return logits, numbers.integers(0, VOCAB, (num_rows, width)).astype(np.int32)


@pytest.mark.parametrize("merged", [False, True])
def test_each_row_gets_as_many_as_it_asked_for_of_its_committed_tokens(merged: bool) -> None:
    logits, targets = random_case(5, 4)
    wanted, num_tokens = [3, None, 0, 20, 1], [4, 2, 3, 1, 2]
    found = logprobs_of(logits, targets, wanted, num_tokens, merged)
    assert found.keys() == {0, 2, 3, 4}
    for row, entries in found.items():
        assert [entry.token_id for entry in entries] == targets[row, : num_tokens[row]].tolist()
        for column, entry in enumerate(entries):
            expected = oracle.log_softmax(logits[row, column])
            assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-5)
            best = np.argsort(-expected)[: wanted[row]]
            assert [token_id for token_id, _ in entry.top] == best.tolist()
            assert [value for _, value in entry.top] == pytest.approx(expected[best].tolist(), abs=1e-5)


def test_nobody_asking_costs_nothing() -> None:
    rows = [plan_row([1], [2], params=SamplingParams(temperature=0))]
    assert SamplingBatch.of(rows, [], 1, VOCAB).logprobs is None
    assert SamplingBatch.of(rows, [], 1, VOCAB, for_trace=True).logprobs is None


def test_a_row_that_commits_nothing_gets_nothing() -> None:
    logits, targets = random_case(2, 3)
    assert logprobs_of(logits, targets, [2, 2], [0, 1])[0] == ()


def test_who_asks_for_how_many_makes_few_kinds_of_passes() -> None:
    wanted = [(0, None), (None, 0), (3, None), (None, 4), (4, 4), (20, None), (17, 3)]
    asked = [LogprobRequest.of(rows_asking(*each), VOCAB, for_trace=True) for each in wanted]
    assert [each.num_top for each in asked if each is not None] == [0, 0, 32, 32, 32, 32, 32]
    assert {each.rows for each in asked if each is not None} == {None}


@pytest.mark.parametrize("merged", [False, True])
def test_more_than_the_vocabulary_is_all_of_it(merged: bool) -> None:
    numbers = np.random.default_rng(1)
    logits = numbers.standard_normal((1, 1, 7)).astype(np.float32)
    (entry,) = logprobs_of(logits, np.array([[3]], np.int32), [20], [1], merged)[0]
    assert [token_id for token_id, _ in entry.top] == np.argsort(-logits[0, 0]).tolist()
    assert sum(np.exp(value) for _, value in entry.top) == pytest.approx(1, abs=1e-5)


def test_temperature_and_filters_do_not_change_them() -> None:
    logits, targets = random_case(1, 1)
    found = []
    for params in (
        SamplingParams(logprobs=5),
        SamplingParams(logprobs=5, temperature=7, top_k=2, top_p=0.3),
    ):
        row = plan_row([1], params=params)
        asked = LogprobRequest.of([row], VOCAB)
        assert asked is not None
        arrays = compute_logprobs(mx.array(logits), mx.array(targets), asked)
        found.append(read_logprobs(arrays, [row], [targets[0].tolist()]))
    assert found[0] == found[1]


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([[[1e4, 1e4 - 1, -1e4]]], np.float32)
    (entry,) = logprobs_of(logits, np.array([[2]], np.int32), [2], [1])[0]
    assert [value for _, value in entry.top] == pytest.approx([-0.31326, -1.31326], abs=1e-3)
    assert entry.logprob == pytest.approx(-2e4, rel=1e-3)
