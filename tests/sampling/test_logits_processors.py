"""Penalties, bias and bans: at every position of a window as if the drafts before it were the answer."""

from __future__ import annotations

import math
import random

import mlx.core as mx
import numpy as np
import pytest

import sampling_oracle as oracle
from outrider.plan import RowPlan
from outrider.request import SamplingParams
from outrider.sampling.logits_processors import MIN_TRACED_IDS, LogitsProcessors
from plan_rows import plan_row

VOCAB = 23


def edit(logits: np.ndarray, rows: list[RowPlan], for_trace: bool = False) -> np.ndarray:
    processors = LogitsProcessors.of(rows, logits.shape[1], VOCAB, for_trace)
    return logits if processors is None else np.array(processors.apply(mx.array(logits)))


def some_logits(num_rows: int, width: int, seed: int = 0) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal((num_rows, width, VOCAB))).astype(np.float32)


def assert_oracle_agrees(logits: np.ndarray, rows: list[RowPlan]) -> None:
    found = edit(logits, rows)
    assert np.array_equal(edit(logits, rows, for_trace=True), found)
    for i, row in enumerate(rows):
        prompt, answer = row.history[: row.num_prompt], row.history[row.num_prompt :]
        drafts = row.token_ids[len(row.token_ids) - row.num_drafts :]
        for column in range(1 + row.num_drafts):
            expected = oracle.edited(
                logits[i, column], row.params, prompt, [*answer, *drafts[:column]], row.banned_ids
            )
            np.testing.assert_allclose(
                found[i, column], expected, atol=2e-5, err_msg=f"{row} column {column}"
            )


def random_row(rng: random.Random, slot: int) -> RowPlan:
    def tokens(most: int, least: int = 0) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(rng.randint(least, most))]

    def some(value: float, off: float) -> float:
        return value if rng.random() < 0.5 else off

    min_tokens = rng.choice((0, 0, 3, 12))
    params = SamplingParams(
        min_tokens=min_tokens,
        repetition_penalty=some(rng.uniform(0.5, 2), 1.0),
        presence_penalty=some(rng.uniform(-2, 2), 0.0),
        frequency_penalty=some(rng.uniform(-2, 2), 0.0),
        logit_bias={i: rng.choice((-math.inf, -100.0, 3.0)) for i in tokens(4)} if rng.random() < 0.5 else {},
        bad_word_ids=[tokens(3, least=1) for _ in range(40)] if rng.random() < 0.5 else (),
    )
    banned = tokens(3) if min_tokens else []
    return plan_row(tokens(12, 1), tokens(10), tokens(8), params=params, slot=slot, banned_ids=banned)


@pytest.mark.parametrize("seed", range(60))
def test_random_windows_are_edited_as_the_oracle_does(seed: int) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng, slot) for slot in range(rng.randint(1, 6))]
    assert_oracle_agrees(some_logits(len(rows), 1 + max(row.num_drafts for row in rows), seed), rows)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(presence_penalty=1.5),
        SamplingParams(frequency_penalty=-0.7),
        SamplingParams(repetition_penalty=1.8),
        SamplingParams(
            repetition_penalty=0.6, presence_penalty=1, frequency_penalty=0.3, logit_bias={4: 2.0}
        ),
    ],
    ids=repr,
)
def test_drafts_count_as_history_for_the_positions_after_them(params: SamplingParams) -> None:
    """The same draft three times over, one that the answer has, one that the prompt has, one that is new."""
    row = plan_row([1, 2, 3], [4, 4, 5], [4, 9, 9, 2, 9, 7], params=params)
    assert_oracle_agrees(some_logits(1, 7), [row])


def test_a_row_without_edits_is_left_alone_bit_for_bit() -> None:
    logits = some_logits(3, 4)
    plain = plan_row([1, 0], [2], [3], params=SamplingParams(), slot=1)
    edited = plan_row([1, 2], [2, 2], [3, 1, 3], params=SamplingParams(presence_penalty=1))
    found = edit(logits, [edited, plain, edited])
    assert np.array_equal(found[1], logits[1])
    assert not np.array_equal(found[0], logits[0])


@pytest.mark.parametrize("num_plain", [0, 1], ids=["all rows edited", "one row plain"])
def test_the_models_own_logits_stay_as_they_are(num_plain: int) -> None:
    """Log-probabilities are read from them afterwards."""
    rows = [plan_row([1], [2], params=SamplingParams(frequency_penalty=1))]
    rows += [plan_row([1], [2], params=SamplingParams(), slot=1)] * num_plain
    logits = mx.array(some_logits(len(rows), 1))
    before = np.array(logits)
    processors = LogitsProcessors.of(rows, 1, VOCAB)
    assert processors is not None
    mx.eval(processors.apply(logits))
    assert np.array_equal(np.array(logits), before)


def test_penalties_on_an_answer_not_yet_begun_do_nothing() -> None:
    """A presence penalty has nothing to touch at the first token, alone or beside a row that edits much."""
    empty = plan_row([1, 2, 3], params=SamplingParams(presence_penalty=1))
    busy = plan_row([1], [2, 3, 4], params=SamplingParams(logit_bias={5: 1.0, 6: 1.0}), slot=1)
    logits = some_logits(2, 1)
    assert np.array_equal(edit(logits[:1], [empty]), logits[:1])
    assert_oracle_agrees(logits, [empty, busy])
    assert_oracle_agrees(logits, [busy, empty])


def test_stop_tokens_are_banned_just_as_long_as_the_answer_is_too_short() -> None:
    params = SamplingParams(min_tokens=4)
    row = plan_row([1], [2, 3], [5, 5, 5, 5], params=params, banned_ids=[7, 8])
    found = edit(some_logits(1, 5), [row])
    assert np.isneginf(found[0, :2, [7, 8]]).all()  # answers of 2 and 3 tokens
    assert np.isfinite(found[0, 2:]).all()
    assert not plan_row([1], [2, 3, 4, 5], params=params, banned_ids=[7]).changes_logits


def test_a_ban_outweighs_a_bias() -> None:
    params = SamplingParams(min_tokens=2, logit_bias={7: 50.0})
    found = edit(some_logits(1, 1), [plan_row([1], params=params, banned_ids=[7])])
    assert np.isneginf(found[0, 0, 7])


def test_a_stop_token_outside_the_vocabulary_needs_no_ban() -> None:
    """Some checkpoints name end tokens that their logits do not have: nothing may be written there."""
    logits = some_logits(2, 1)
    row = plan_row([1], params=SamplingParams(min_tokens=2), banned_ids=[VOCAB, VOCAB + 5])
    assert np.array_equal(edit(logits, [row, row]), logits)


def test_repetition_pushes_both_signs_away_from_being_picked() -> None:
    logits = np.array([[[2.0, -2.0, 0.0] + [0.0] * (VOCAB - 3)]], np.float32)
    found = edit(logits, [plan_row([0], [1, 2], params=SamplingParams(repetition_penalty=2))])
    assert found[0, 0, :3].tolist() == [1.0, -4.0, 0.0]


def test_merged_edits_come_in_few_sizes() -> None:
    """So that passes over them repeat while the answers grow."""
    params = SamplingParams(presence_penalty=1)

    def key(num_tokens: int) -> object:
        processors = LogitsProcessors.of(
            [plan_row([1], list(range(num_tokens)), params=params)], 1, 10_000, for_trace=True
        )
        assert processors is not None
        assert processors.ids.shape[-1] >= num_tokens
        return processors.key

    assert len({key(num) for num in range(1, MIN_TRACED_IDS + 1)}) == 1
    more = (MIN_TRACED_IDS + 1, 2 * MIN_TRACED_IDS, 2 * MIN_TRACED_IDS + 1, 4 * MIN_TRACED_IDS)
    assert len({key(num) for num in more}) == 2
