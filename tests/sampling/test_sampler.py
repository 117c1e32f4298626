"""Sampler: the rule, its filters and its coupling, against a NumPy oracle and against theory."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

import sampling_oracle as oracle
from outrider.request import NUM_CANDIDATES, SamplingParams
from outrider.sampling import sampler
from outrider.sampling.sampler import Sampler
from patience import case_only_in_soak

WIDE = 3000  # more tokens than a filter's candidates
pytestmark = pytest.mark.usefixtures("both_ways")


def sample(logits: mx.array, positions: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    return Sampler.of(params).sample(logits, positions)


def sample_drafts(
    logits: mx.array, positions: mx.array, params: Sequence[SamplingParams], token_ids: mx.array | None
) -> mx.array:
    return Sampler.of(params).sample_drafts(logits, positions, token_ids)


def sampled(logits: np.ndarray, positions: np.ndarray, params: list[SamplingParams]) -> np.ndarray:
    return np.array(sample(mx.array(logits.astype(np.float32)), mx.array(positions), params))


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((0, 0.1, 0.7, 1.0, 1.0, 3.0, 30.0)),
        top_k=rng.choice((0, 0, 1, 2, 10, 50, 1024, 1500, 2000, 5000)),
        top_p=rng.choice((1.0, 1.0, 0.01, 0.5, 0.9, 0.99, 0.9999)),
        min_p=rng.choice((0.0, 0.0, 0.001, 0.1, 0.9, 1.0)),
        seed=rng.getrandbits(64),
    )


def assert_oracle_agrees(logits: np.ndarray, positions: np.ndarray, params: list[SamplingParams]) -> None:
    logits = logits.astype(np.float32)
    found = sampled(logits, positions, params)
    num_loose = 0
    for row, column in np.ndindex(found.shape):
        choice = oracle.choose(
            logits[row, column].astype(np.float64), int(positions[row, column]), params[row]
        )
        if choice.is_firm:
            assert found[row, column] == choice.token_id, (params[row], int(positions[row, column]))
        num_loose += not choice.is_firm
    assert num_loose <= 1 + found.size // 50


@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0], ids=["flat", "plain", "peaked"])
@pytest.mark.parametrize("vocab", [1, 7, 113, WIDE])
def test_batches_of_any_mixture_pick_what_the_oracle_picks(vocab: int, scale: float) -> None:
    rng, numbers = random.Random(vocab), np.random.default_rng(vocab)
    for _ in range(6):
        rows, width = rng.randint(1, 6), rng.randint(1, 4)
        logits = scale * numbers.standard_normal((rows, width, vocab))
        positions = numbers.integers(0, 4000, (rows, width)).astype(np.int32)
        assert_oracle_agrees(logits, positions, [random_params(rng) for _ in range(rows)])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.9, seed=1),
        SamplingParams(top_p=0.999, temperature=2.0, seed=2),
        SamplingParams(top_k=2000, seed=3),
        SamplingParams(top_k=2000, top_p=0.4, seed=4),
        SamplingParams(top_k=2000, top_p=0.9, seed=5),
        SamplingParams(top_k=NUM_CANDIDATES, top_p=0.9, seed=6),
        SamplingParams(top_k=NUM_CANDIDATES + 1, seed=7),
        SamplingParams(top_k=NUM_CANDIDATES - 1, seed=8),
        SamplingParams(min_p=0.5, seed=9),
        SamplingParams(top_k=10**6, top_p=0.5, min_p=0.9, seed=10),
    ],
    ids=repr,
)
def test_filters_that_leave_more_than_the_candidates_look_at_all(params: SamplingParams) -> None:
    numbers = np.random.default_rng(0)
    logits = 0.1 * numbers.standard_normal((2, 20, WIDE))
    assert_oracle_agrees(logits, np.arange(40, dtype=np.int32).reshape(2, 20), [params, params])


@pytest.mark.parametrize("top_p", [case_only_in_soak(0.3), 0.6, case_only_in_soak(0.9)])
def test_top_p_is_a_share_of_what_a_large_top_k_leaves(top_p: float) -> None:
    """Of 2,000 equal tokens top_p keeps its share; judged by 1,024 candidates alone it would keep fewer."""
    logits = np.zeros((1, 4000, WIDE), np.float32)
    logits[..., 2000:] = -8
    positions = np.arange(4000, dtype=np.int32)[None]
    found = sampled(logits, positions, [SamplingParams(top_k=2000, top_p=top_p, seed=1)])
    assert abs(found.max() - 2000 * top_p) < 15


def test_the_best_first_order_does_not_depend_on_how_many_are_looked_at() -> None:
    """Equal logits stand in the order of their ids, in candidates and in the whole vocabulary alike."""
    coarse = np.round(np.random.default_rng(1).standard_normal((3, 2, WIDE)) * 2) / 2
    few, all_ = (
        np.array(sampler._best_columns(mx.array(coarse.astype(np.float32)), num)) for num in (1024, WIDE)
    )
    above = np.take_along_axis(coarse, few, -1) > np.take_along_axis(coarse, few[..., -1:], -1)
    assert np.array_equal(few[above], all_[..., :1024][above])


@pytest.mark.parametrize(
    "params", [SamplingParams(top_k=k, top_p=p, seed=3) for k in (1, 4, 40) for p in (1.0, 0.5)]
)
def test_ties_at_a_filters_edge_go_to_the_lowest_ids(params: SamplingParams) -> None:
    coarse = np.round(np.random.default_rng(2).standard_normal((1, 60, WIDE)))
    positions = np.arange(60, dtype=np.int32)[None]
    found = sampled(coarse, positions, [params])
    expected = [oracle.choose(coarse[0, i], i, params).token_id for i in range(60)]
    assert found[0].tolist() == expected


def test_a_neighbour_that_needs_the_whole_vocabulary_changes_nothing() -> None:
    numbers = np.random.default_rng(3)
    peaked = np.round(numbers.standard_normal((1, 8, WIDE)) * 4) / 4
    flat = np.zeros((1, 8, WIDE))
    positions = np.arange(16, dtype=np.int32).reshape(2, 8)
    mine, other = SamplingParams(top_k=50, top_p=0.9, seed=5), SamplingParams(top_p=0.99, seed=6)
    alone = sampled(peaked, positions[:1], [mine])
    beside = sampled(np.concatenate([peaked, flat]), positions, [mine, other])
    assert np.array_equal(alone[0], beside[0])


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = np.array([[[0, 3, 3, 1], [2, 2, 2, 2]]], np.float32)
    assert sampled(logits, np.array([[0, 1]]), [SamplingParams(temperature=0)]).tolist() == [[1, 0]]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(seed=1),
        SamplingParams(temperature=50.0, seed=2),
        SamplingParams(temperature=1e-320, seed=2),
        SamplingParams(top_k=3, seed=3),
        SamplingParams(top_p=0.999, seed=4),
        SamplingParams(min_p=0.001, temperature=20.0, seed=5),
        SamplingParams(top_k=10**9, top_p=0.9, seed=5),
    ],
    ids=repr,
)
@pytest.mark.parametrize("vocab", [12, WIDE])
def test_a_banned_token_is_never_picked(params: SamplingParams, vocab: int) -> None:
    allowed = [2, 3, 7]
    logits = np.full((1, 200, vocab), -np.inf, np.float32)
    logits[..., allowed] = [0.0, -4.0, 1.0]
    found = sampled(logits, np.arange(200, dtype=np.int32)[None], [params])
    assert set(found[0].tolist()) <= set(allowed)


@pytest.mark.parametrize("temperature", [1e-3, 1e-8, 1e-30, 1e-38, 1e-45, 5e-324])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=repr)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_very_small_temperature_is_greedy(temperature: float, filters: dict, sign: int) -> None:
    """Logits of both signs and an exact zero: none may turn into infinity or NaN."""
    logits = np.stack([np.random.default_rng(i).permutation(100) for i in range(20)])[None].astype(np.float32)
    logits = sign * logits - 30 * (sign + 1) / 2
    params = SamplingParams(temperature=temperature, seed=1, **filters)
    found = sampled(logits, np.arange(20, dtype=np.int32)[None], [params])
    assert np.array_equal(found, logits.argmax(-1))


@pytest.mark.parametrize("vocab", [5, 113])
def test_a_top_k_beyond_the_vocabulary_is_no_filter(vocab: int) -> None:
    logits = np.random.default_rng(4).standard_normal((1, 50, vocab))
    positions = np.arange(50, dtype=np.int32)[None]
    free = sampled(logits, positions, [SamplingParams(seed=9)])
    for top_k in (vocab, vocab + 1, 10**9):
        assert np.array_equal(free, sampled(logits, positions, [SamplingParams(top_k=top_k, seed=9)]))


@pytest.mark.parametrize(
    "params", [SamplingParams(top_p=1e-6, seed=1), SamplingParams(min_p=1.0, seed=1)], ids=repr
)
def test_the_strictest_filters_leave_the_best_token(params: SamplingParams) -> None:
    logits = np.random.default_rng(5).standard_normal((1, 50, 113)).astype(np.float32)
    found = sampled(logits, np.arange(50, dtype=np.int32)[None], [params])
    assert np.array_equal(found, logits.argmax(-1))


def test_equals_of_the_best_pass_the_strictest_min_p() -> None:
    logits = np.zeros((1, 200, 5), np.float32)
    logits[..., 3:] = -0.01
    found = sampled(logits, np.arange(200, dtype=np.int32)[None], [SamplingParams(min_p=1.0, seed=1)])
    assert set(found[0].tolist()) == {0, 1, 2}


def test_every_row_keeps_its_own_sampler() -> None:
    """A temperature-0 row beside hot ones is greedy, and a hot one is hot, wherever they stand."""
    rng, numbers = random.Random(8), np.random.default_rng(8)
    logits = numbers.standard_normal((9, 40, 113)).astype(np.float32)
    positions = np.tile(np.arange(40, dtype=np.int32), (9, 1))
    params = [random_params(rng) for _ in range(6)]
    params[2:2] = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=9.0, seed=1),
        SamplingParams(temperature=0),
    ]
    found = sampled(logits, positions, params)
    for row in range(9):
        alone = sampled(logits[row : row + 1], positions[row : row + 1], params[row : row + 1])
        assert np.array_equal(alone[0], found[row])
    assert np.array_equal(found[2], logits[2].argmax(-1))
    assert np.array_equal(found[4], logits[4].argmax(-1))
    assert np.mean(found[3] == logits[3].argmax(-1)) < 0.3


def test_a_window_picks_what_its_positions_pick_one_by_one() -> None:
    rng, numbers = random.Random(9), np.random.default_rng(9)
    logits = numbers.standard_normal((5, 9, 113)).astype(np.float32)
    positions = (np.array([3, 100, 0, 55, 8])[:, None] + np.arange(9)).astype(np.int32)
    params = [random_params(rng) for _ in range(5)]
    window = sampled(logits, positions, params)
    for column in range(9):
        one = sampled(logits[:, column : column + 1], positions[:, column : column + 1], params)
        assert np.array_equal(one[:, 0], window[:, column])


# -- what is random about it -----------------------------------------------------------------------------


def test_unseeded_requests_differ() -> None:
    logits = np.zeros((2, 30, 113), np.float32)
    positions = np.tile(np.arange(30, dtype=np.int32), (2, 1))
    found = sampled(logits, positions, [SamplingParams().with_seed(), SamplingParams().with_seed()])
    assert not np.array_equal(found[0], found[1])


def test_sampling_without_a_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="with_seed"):
        sampled(np.zeros((1, 1, 5)), np.zeros((1, 1), np.int32), [SamplingParams()])


PROBABILITIES = np.array([0.35, 0.25, 0.15, 0.1, 0.06, 0.04, 0.03, 0.02])
FILTERS = [
    ({}, PROBABILITIES),
    ({"temperature": 2.0}, np.sqrt(PROBABILITIES)),
    ({"temperature": 0.5}, PROBABILITIES**2),
    ({"top_k": 3}, PROBABILITIES * (np.arange(8) < 3)),
    ({"top_p": 0.7}, PROBABILITIES * (np.arange(8) < 3)),  # 0.35 + 0.25 < 0.7: the third crosses the line
    ({"top_k": 4, "top_p": 0.75}, PROBABILITIES * (np.arange(8) < 3)),  # of 0.85: 0.6375
    ({"min_p": 0.2}, PROBABILITIES * (np.arange(8) < 4)),
]


def assert_matches(found: np.ndarray, weights: np.ndarray) -> None:
    counts = np.bincount(found, minlength=len(weights))
    possible = weights > 0
    assert not counts[~possible].any()
    expected = found.size * weights[possible] / weights.sum()
    assert oracle.chi_square_p(counts[possible], expected) > 1e-4


@pytest.mark.parametrize(
    ("filters", "weights"), FILTERS, ids=lambda value: repr(value) if isinstance(value, dict) else ""
)
def test_picks_over_many_positions_have_the_right_distribution(filters: dict, weights: np.ndarray) -> None:
    num = 40_000
    logits = np.broadcast_to(np.log(PROBABILITIES) + 3, (1, num, 8))
    found = sampled(logits, np.arange(num, dtype=np.int32)[None], [SamplingParams(seed=11, **filters)])
    assert_matches(found[0], weights)


@pytest.mark.parametrize(
    ("filters", "weights"), FILTERS, ids=lambda value: repr(value) if isinstance(value, dict) else ""
)
def test_picks_over_many_seeds_have_the_right_distribution(filters: dict, weights: np.ndarray) -> None:
    num = 20_000
    logits = np.broadcast_to(np.log(PROBABILITIES), (num, 1, 8))
    params = [SamplingParams(seed=seed, **filters) for seed in range(num)]
    found = sampled(logits, np.full((num, 1), 40, np.int32), params)
    assert_matches(found[:, 0], weights)


def test_neighbouring_positions_and_seeds_are_picked_independently() -> None:
    num = 30_000
    logits = np.broadcast_to(np.log(PROBABILITIES[:4]), (2, num, 4))
    positions = np.tile(np.arange(num, dtype=np.int32), (2, 1))
    found = sampled(logits, positions, [SamplingParams(seed=20), SamplingParams(seed=21)])
    weights = np.outer(PROBABILITIES[:4], PROBABILITIES[:4]).ravel()
    assert_matches(found[0] * 4 + found[1], weights)
    assert_matches(found[0, :-1:2] * 4 + found[0, 1::2], weights)


def test_a_rare_token_of_a_large_vocabulary_is_rare() -> None:
    """The tail of the noise decides: 12,000 tokens that weigh 3 % together win 3 % of the picks."""
    vocab, num = 12_000, 1500
    logits = np.full(vocab, math.log(0.03 / (vocab - 1)), np.float32)
    logits[123] = math.log(0.97)
    found = sampled(
        np.broadcast_to(logits, (1, num, vocab)),
        np.arange(num, dtype=np.int32)[None],
        [SamplingParams(seed=2)],
    )
    expected = 0.03 * num
    assert abs(np.sum(found != 123) - expected) < 4 * math.sqrt(expected)


# -- coupling --------------------------------------------------------------------------------------------


def coupled_rate(p: np.ndarray, q: np.ndarray) -> float:
    """How often argmax(log p + g) and argmax(log q + g) are the same token, for common Gumbel noise g.

    Token i wins both iff g_i > g_j + a_ij for all other j, with a_ij = log max(p_j / p_i, q_j / q_i); and one
    Gumbel variable beats others shifted by a_ij with probability 1 / (1 + sum_j exp(a_ij)).
    """
    both = np.flatnonzero((p > 0) & (q > 0))
    return sum(1 / sum(np.maximum(p / p[i], q / q[i])) for i in both)


def distributions(seed: int, num: int = 12, spread: float = 1.5) -> tuple[np.ndarray, np.ndarray]:
    p, q = np.exp(spread * np.random.default_rng(seed).standard_normal((2, num)))
    return p / p.sum(), q / q.sum()


def as_logits(weights: np.ndarray, num: int) -> mx.array:
    with np.errstate(divide="ignore"):
        return mx.array(np.broadcast_to(np.log(weights), (1, num, weights.size)).astype(np.float32))


def test_the_formula_holds_for_simulated_noise() -> None:
    p, q = distributions(0)
    noise = np.random.default_rng(1).gumbel(size=(200_000, 12))
    same = np.mean((np.log(p) + noise).argmax(1) == (np.log(q) + noise).argmax(1))
    assert abs(same - coupled_rate(p, q)) < 5 / math.sqrt(4 * 200_000)
    assert np.sum(p * q) < coupled_rate(p, q) <= np.sum(np.minimum(p, q))
    assert coupled_rate(p, p) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_coupled_drafts_are_accepted_at_the_rate_that_theory_gives(seed: int, temperature: float) -> None:
    num = 40_000
    p, q = distributions(seed)
    params = [SamplingParams(temperature=temperature, seed=seed)]
    positions = mx.arange(num)[None]
    same = sample(as_logits(p, num), positions, params) == sample_drafts(
        as_logits(q, num), positions, params, None
    )
    rate = float(mx.mean(same.astype(mx.float32)).item())
    cooled_p, cooled_q = (w ** (1 / temperature) / np.sum(w ** (1 / temperature)) for w in (p, q))
    assert abs(rate - coupled_rate(cooled_p, cooled_q)) < 5 / math.sqrt(4 * num)


@pytest.mark.parametrize("filters", [{"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.3}], ids=repr)
def test_filtered_drafts_are_accepted_at_the_rate_that_theory_gives(filters: dict) -> None:
    num = 40_000
    p, q = distributions(5)
    params = SamplingParams(seed=3, **filters)
    positions = mx.arange(num)[None]
    same = sample(as_logits(p, num), positions, [params]) == sample_drafts(
        as_logits(q, num), positions, [params], None
    )
    cut_p, cut_q = (np.where(oracle.kept(np.log(w), params), w, 0) for w in (p, q))
    expected = coupled_rate(cut_p / cut_p.sum(), cut_q / cut_q.sum())
    assert abs(float(mx.mean(same.astype(mx.float32)).item()) - expected) < 5 / math.sqrt(4 * num)


def test_a_reduced_draft_vocabulary_drafts_by_the_noise_of_the_true_ids() -> None:
    num = 40_000
    p, q = distributions(6)
    ids = np.array([1, 2, 5, 8, 11])
    reduced = np.zeros(12)
    reduced[ids] = q[ids]
    reduced /= reduced.sum()
    positions = mx.arange(num)[None]
    for params in (SamplingParams(seed=4), SamplingParams(top_k=3, seed=4), SamplingParams(temperature=0)):
        drafts = sample_drafts(as_logits(q[ids], num), positions, [params], mx.array(ids))
        assert mx.array_equal(drafts, sample(as_logits(reduced, num), positions, [params]))
    params = SamplingParams(seed=4)
    same = sample(as_logits(p, num), positions, [params]) == sample_drafts(
        as_logits(q[ids], num), positions, [params], mx.array(ids)
    )
    assert abs(float(mx.mean(same.astype(mx.float32)).item()) - coupled_rate(p, reduced)) < 5 / math.sqrt(
        4 * num
    )


@pytest.mark.parametrize("is_reduced", [False, True])
def test_drafts_with_margins_are_the_same_drafts(is_reduced: bool) -> None:
    """The margin is the distance to the score of the second best token, which is drafted without the best."""
    rng = random.Random(3)
    params = [SamplingParams(temperature=0), *(random_params(rng) for _ in range(11))]
    logits = 4 * np.random.default_rng(8).standard_normal((12, 2, 40)).astype(np.float32)
    positions = mx.arange(24).reshape(12, 2)
    ids = mx.arange(40)[::-1] * 3 if is_reduced else None
    drafter = Sampler.of(params)
    drafts, margins = drafter.sample_drafts_with_margins(mx.array(logits), positions, ids)
    assert mx.array_equal(drafts, drafter.sample_drafts(mx.array(logits), positions, ids))
    assert (np.array(margins) >= 0).all()
    columns = np.array(drafts) if ids is None else 39 - np.array(drafts) // 3
    lower, greedy = logits.copy(), np.sort(logits[0], axis=-1)
    assert np.allclose(np.array(margins)[0], greedy[:, -1] - greedy[:, -2])
    for i, one in enumerate(params):  # a draft stays the same while it loses less than its margin
        scale = 1.0 if one.is_greedy else max(one.temperature, 1e-3)
        margin = np.minimum(np.array(margins)[i], 1e3) * scale
        for j, column in enumerate(columns[i]):
            lower[i, j, column] -= 0.99 * margin[j] if not one.is_filtered else 0
    again = drafter.sample_drafts(mx.array(lower), positions, ids)
    assert mx.array_equal(drafts, again)


def test_a_draft_that_loses_more_than_its_margin_is_another() -> None:
    params = [SamplingParams(temperature=0.7, seed=5)]
    logits = np.random.default_rng(9).standard_normal((1, 50, 30)).astype(np.float32)
    positions = mx.arange(50)[None]
    drafts, margins = Sampler.of(params).sample_drafts_with_margins(mx.array(logits), positions, None)
    np.put_along_axis(
        logits,
        np.array(drafts)[..., None],
        np.take_along_axis(logits, np.array(drafts)[..., None], -1)
        - 0.7 * 1.01 * np.array(margins)[..., None],
        -1,
    )
    assert not (sample_drafts(mx.array(logits), positions, params, None) == drafts).any()


def test_greedy_drafts_are_accepted_where_the_best_tokens_agree() -> None:
    p, q = np.random.default_rng(7).standard_normal((2, 1, 500, 9)).astype(np.float32)
    params = [SamplingParams(temperature=0)]
    positions = mx.arange(500)[None]
    same = sample(mx.array(p), positions, params) == sample_drafts(mx.array(q), positions, params, None)
    assert np.array_equal(np.array(same), p.argmax(-1) == q.argmax(-1))


@pytest.mark.parametrize("seed", range(12))
def test_greedy_rows_in_company_pick_what_they_pick_alone(seed: int) -> None:
    """A sampler for a trace has fewer groups and samples the same tokens."""
    rng = random.Random(seed)
    params = [random_params(rng) for _ in range(6)] + [SamplingParams(temperature=0)] * 2
    rng.shuffle(params)
    logits = np.random.default_rng(seed).normal(size=(8, 3, WIDE)).astype(np.float32) * 3
    positions = np.arange(24, dtype=np.int32).reshape(8, 3)
    inputs = mx.array(logits), mx.array(positions)
    merged = Sampler.of(params, for_trace=True)
    assert np.array_equal(np.array(merged.sample(*inputs)), sampled(logits, positions, params))
    names = {group.kind for group in merged.groups}
    assert "greedy" not in names or names <= {"greedy", "wide"}


@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0], ids=["flat", "usual", "sharp"])
def test_passes_that_must_not_wait_filter_by_the_whole_vocabulary_at_once(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a traced pass picks is what the candidates, or all of them where they are not enough, give."""
    rng = random.Random(31)
    numbers = np.random.default_rng(31)
    for _ in range(8):
        params = [random_params(rng) for _ in range(5)]
        logits = (scale * numbers.standard_normal((5, 2, WIDE))).astype(np.float32)
        positions = numbers.integers(1, 1000, (5, 2)).astype(np.int32)
        expected = sampled(logits, positions, params)
        with monkeypatch.context() as patch:
            patch.setattr(mx.array, "item", _must_not_read)
            merged = Sampler.of(params, for_trace=True).sample(mx.array(logits), mx.array(positions))
        assert np.array_equal(np.array(merged), expected)


def _must_not_read(_: mx.array) -> None:
    raise AssertionError("a result was read")


def test_which_rows_are_of_which_kind_is_in_arrays() -> None:
    """As long as there are as many of each, whoever they are, a traced pass serves them."""
    greedy, hot = SamplingParams(temperature=0), SamplingParams(temperature=1, seed=1)
    few, wide = replace(hot, top_k=20), replace(hot, top_p=0.9)
    one = Sampler.of([hot, few, greedy, wide, hot], for_trace=True)
    other = Sampler.of([wide, hot, hot, few, greedy], for_trace=True)
    assert one.key == other.key
    assert {group.kind: group.num_rows for group in one.groups} == {"random": 3, "filtered": 1, "wide": 1}
    assert Sampler.of([few, few, greedy, wide, hot], for_trace=True).key != one.key

    logits = np.random.default_rng(2).standard_normal((5, 2, WIDE)).astype(np.float32)
    positions = np.arange(10).reshape(5, 2).astype(np.int32)
    found = one.with_arrays(other.arrays).sample(mx.array(logits), mx.array(positions))
    assert np.array_equal(np.array(found), sampled(logits, positions, [wide, hot, hot, few, greedy]))


def test_greedy_rows_do_not_sort_the_vocabulary_with_others() -> None:
    wide = SamplingParams(temperature=1, top_p=0.9, seed=1)
    how = Sampler.of([SamplingParams(temperature=0), wide], for_trace=True)
    assert [(group.kind, group.num_rows) for group in how.groups] == [("greedy", 1), ("wide", 1)]
