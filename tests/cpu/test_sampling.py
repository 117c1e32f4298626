"""The native drawing of tokens: one result for all instructions, threads and neighbours.

tests/sampling/test_sampler.py tests the rule.
"""

from __future__ import annotations

import random
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest

import sampling_oracle as oracle
from outrider.cpu import sampling
from outrider.cpu.kernel_switch import INSTRUCTIONS
from outrider.request import SamplingParams
from outrider.sampling.sampler import Sampler

VOCAB = 49_157  # no multiple of a register
WAYS = [
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=0.7, top_p=0.8, top_k=20, seed=2),
    SamplingParams(temperature=1.0, top_p=0.95, seed=3),
    SamplingParams(temperature=1.5, min_p=0.05, seed=4),
    SamplingParams(temperature=1.0, top_k=2000, seed=5),
    SamplingParams(temperature=2.0, top_p=0.999, min_p=1e-5, seed=6),
]


def logits_of(num_rows: int, width: int, scale: float = 3.0, seed: int = 0) -> mx.array:
    return mx.random.normal((num_rows, width, VOCAB), key=mx.random.key(seed)) * scale


def drawn(logits: mx.array, positions: mx.array, params: list[SamplingParams]) -> tuple[list, list]:
    group = Sampler.of(params).groups[0]
    found = sampling.draw(logits, positions, group.numbers, None, wants_margins=True)
    assert found is not None
    return found[0].tolist(), found[1].tolist()


@pytest.mark.parametrize("params", WAYS, ids=lambda p: f"{p.top_k}-{p.top_p}-{p.min_p}")
def test_instructions_and_threads_change_no_bit(
    native: ModuleType, as_before: None, params: SamplingParams
) -> None:
    logits, positions = logits_of(3, 2), mx.array([[5, 6], [70, 71], [800, 801]])
    expected = drawn(logits, positions, [params] * 3)
    for instructions in INSTRUCTIONS:
        if not native.use_instructions(instructions):
            continue
        for threads in (1, 2, 7):
            native.set_num_threads(threads)
            assert drawn(logits, positions, [params] * 3) == expected


@pytest.mark.parametrize("params", WAYS, ids=lambda p: f"{p.top_k}-{p.top_p}-{p.min_p}")
def test_the_oracle_draws_the_same_of_a_large_vocabulary(native: ModuleType, params: SamplingParams) -> None:
    logits = logits_of(1, 12)
    positions = mx.arange(100, 112)[None]
    tokens, margins = drawn(logits, positions, [params])
    num_firm = 0
    for place, token in enumerate(tokens[0]):
        own = np.array(logits[0, place], np.float64)
        choice = oracle.choose(own, 100 + place, params)
        num_firm += choice.is_firm
        assert token == choice.token_id or not choice.is_firm
        scores = own / params.temperature + oracle.gumbel(params.seed or 0, 100 + place, np.arange(VOCAB))
        scores[~oracle.kept(own / params.temperature, params)] = -np.inf
        if choice.is_firm:
            best, second = np.sort(scores)[:-3:-1]
            assert margins[0][place] == pytest.approx(best - second, abs=1e-4)
    assert num_firm >= 10


def test_margins_are_the_same_whoever_asks_for_them(native: ModuleType) -> None:
    logits, positions = logits_of(2, 3, seed=1), mx.arange(6).reshape(2, 3)
    group = Sampler.of(WAYS[:1] * 2).groups[0]
    without = sampling.draw(logits, positions, group.numbers, None, wants_margins=False)
    assert without is not None
    assert without[0].tolist() == drawn(logits, positions, WAYS[:1] * 2)[0]


@pytest.mark.parametrize("banned", [0.5, 0.999, 1.0], ids=["half", "nearly all", "all"])
def test_tokens_that_a_grammar_forbids_are_never_drawn(native: ModuleType, banned: float) -> None:
    allowed = np.random.default_rng(0).random(VOCAB) >= banned
    logits = mx.where(mx.array(allowed), logits_of(1, 8), -mx.inf)
    for params in WAYS:
        tokens, _ = drawn(logits, mx.arange(8)[None], [params])
        assert all(allowed[token] for token in tokens[0]) if allowed.any() else tokens[0] == [0] * 8


def test_views_of_arrays_are_read_as_they_are(native: ModuleType) -> None:
    wide = logits_of(3, 2, seed=2)
    for params in WAYS:
        for view in (wide[:, ::-1], wide[..., 3:2003], mx.broadcast_to(wide[:1], wide.shape)):
            positions = mx.broadcast_to(mx.array([7, 8]), (3, 2))
            own = mx.array(np.array(view))
            assert drawn(view, positions, [params] * 3) == drawn(own, positions, [params] * 3)


def test_a_number_that_is_none_never_wins(native: ModuleType) -> None:
    numbers = np.array(logits_of(1, 4))
    numbers[..., ::3] = np.nan
    for params in WAYS:
        tokens, _ = drawn(mx.array(numbers), mx.arange(4)[None], [params])
        assert all(token % 3 for token in tokens[0])


@pytest.mark.parametrize("seed", range(20))
def test_columns_that_have_other_ids_have_the_noise_of_these(native: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    kept = sorted(rng.sample(range(VOCAB), rng.choice((1, 5, 33, 3000))))
    whole, positions = logits_of(1, 2, seed=seed), mx.array([[seed, seed + 1]])
    only = mx.full((VOCAB,), -mx.inf)
    only[mx.array(kept)] = 0.0
    params = SamplingParams(temperature=0.9, seed=seed)
    expected, _ = drawn(whole + only, positions, [params])
    ids = mx.array(kept)
    numbers = Sampler.of([params]).groups[0].numbers
    found = sampling.draw(whole[..., ids], positions, numbers, ids, wants_margins=True)
    assert found is not None
    assert found[0].tolist() == expected


def test_the_best_logit_may_be_zero_and_all_others_forbidden(native: ModuleType) -> None:
    logits = mx.full((1, 1, 64), -mx.inf)
    logits[0, 0, 3] = 0.0
    for params in WAYS:
        assert drawn(logits, mx.array([[0]]), [params])[0] == [[3]]


def test_numbers_so_large_that_noise_is_rounded_away(native: ModuleType) -> None:
    """Of equal scores the first column's wins, and no column that may win is passed over."""
    few = np.full((1, 3000, 40), 2.0**24 + 8, np.float32)
    few[:, :, 5:], few[:, :, 30] = -np.inf, 2.0**24 + 10
    many = np.full((1, 3, 49157), -(2.0**29), np.float32)
    for numbers, first in ((few, 0), (many, 84)):
        logits, positions = mx.array(numbers), mx.arange(first, first + numbers.shape[1])[None]
        group = Sampler.of([SamplingParams(temperature=1.0, seed=1)]).groups[0]
        expected = mx.argmax(group._scores(logits, positions, None, is_draft=False)[0], axis=-1).tolist()
        for wants_margins in (False, True):
            found = sampling.draw(logits, positions, group.numbers, None, wants_margins)
            assert found is not None
            assert found[0].tolist() == expected


def test_arrays_that_do_not_fit_are_refused(native: ModuleType) -> None:
    logits, positions = mx.zeros((2, 1, 8)), mx.zeros((2, 1), mx.int32)
    factors, seeds, filters = mx.ones(2), mx.zeros((2, 2), mx.uint32), [mx.ones(2)] * 3
    for wrong, message in (
        ((logits[0], positions, factors, seeds, filters, None), "logits must be float32"),
        ((logits.astype(mx.float16), positions, factors, seeds, filters, None), "logits must be float32"),
        ((logits, positions[:1], factors, seeds, filters, None), "positions must be"),
        ((logits, positions, factors[:1], seeds, filters, None), "one temperature"),
        ((logits, positions, factors, seeds[:1], filters, None), "two words of a seed"),
        ((logits, positions, factors, seeds, filters[:2], None), "filters are top_k"),
        ((logits, positions, factors, seeds, [mx.ones(1)] * 3, None), "one number of each filter"),
        ((logits, positions, factors, seeds, filters, mx.arange(7)), "one token id for each column"),
    ):
        with pytest.raises(ValueError, match=message):
            native.sample(*wrong, True)


def test_masks_and_logprobs_that_do_not_fit_are_refused(native: ModuleType) -> None:
    logits, words, rows = mx.zeros((2, 1, 40)), mx.zeros((1, 1, 2), mx.uint32), mx.zeros(1, mx.int32)
    for wrong, message in (
        ((logits[0], words, rows), "logits must be float32"),
        ((logits, words.astype(mx.int32), rows), "words must be uint32"),
        ((logits, mx.zeros((1, 2, 2), mx.uint32), rows), "words must be uint32"),
        ((logits, words, mx.zeros(2, mx.int32)), "rows must be int32"),
    ):
        with pytest.raises(ValueError, match=message):
            native.mask_logits(*wrong)
    targets = mx.zeros((2, 1), mx.int32)
    for unfit, message in (
        ((logits[0], targets, 1), "logits must be float32"),
        ((logits, targets[0], 1), "targets must be"),
        ((logits, targets, 41), "at most the whole vocabulary"),
        ((logits, targets, -1), "at most the whole vocabulary"),
    ):
        with pytest.raises(ValueError, match=message):
            native.logprobs(*unfit)


def test_masked_tokens_are_the_last_among_the_most_likely(native: ModuleType) -> None:
    logits = mx.array([[[-np.inf, 1.0, -np.inf, 2.0, -np.inf]]])
    of_target, ids, values = native.logprobs(logits, mx.array([[9]]), 4)
    assert of_target.item() == -np.inf
    assert {*ids.tolist()[0][0][:2]} == {1, 3}
    assert ids.tolist()[0][0][2:] == [0, 2]
    assert values.tolist()[0][0][2:] == [-np.inf, -np.inf]
