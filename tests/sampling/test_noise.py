"""The noise: standard Gumbel, a function of (seed, position, token) and of nothing else."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

import sampling_oracle as oracle
from outrider.sampling.noise import gumbel, seed_words

SEEDS = (0, 1, 2, 12345, -1, 2**32, 2**63, 2**64 - 1)
MASK32 = 0xFFFFFFFF


def noise(seeds: list[int], positions: list[list[int]], token_ids: np.ndarray) -> np.ndarray:
    return np.array(gumbel(seed_words(seeds), mx.array(positions), mx.array(token_ids.astype(np.uint32))))


def uniform(sample: np.ndarray) -> np.ndarray:
    """The distribution function of Gumbel noise: uniform if the noise is right."""
    return np.exp(-np.exp(-sample.astype(np.float64)))


@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_the_oracles(seed: int) -> None:
    ids = np.arange(1000)
    for position in (0, 1, 77, 100_000):
        found = noise([seed], [[position]], ids)[0, 0]
        np.testing.assert_allclose(found, oracle.gumbel(seed, position, ids), atol=1e-5)


def along_tokens() -> np.ndarray:
    return noise([3], [[9]], np.arange(200_000))[0, 0]


def along_positions() -> np.ndarray:
    return noise([3], [list(range(200_000))], np.array([17]))[0, :, 0]


def along_seeds() -> np.ndarray:
    return noise(list(range(200_000)), [[9]] * 200_000, np.array([17]))[:, 0, 0]


def along_high_seed_words() -> np.ndarray:
    return noise([i << 32 for i in range(200_000)], [[9]] * 200_000, np.array([17]))[:, 0, 0]


WAYS = [along_tokens, along_positions, along_seeds, along_high_seed_words]


@pytest.mark.parametrize("way", WAYS)
def test_it_is_gumbel_distributed(way) -> None:
    sample = uniform(way())
    counts, _ = np.histogram(sample, bins=200, range=(0, 1))
    assert oracle.chi_square_p(counts, sample.size / 200) > 1e-4


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lag", [1, 2, 256])
def test_neighbours_are_independent(way, lag: int) -> None:
    sample = uniform(way())
    counts, _, _ = np.histogram2d(sample[:-lag], sample[lag:], bins=16, range=((0, 1), (0, 1)))
    assert oracle.chi_square_p(counts, (sample.size - lag) / 256) > 1e-4


@pytest.mark.parametrize(
    ("one", "other"),
    [((5, 9), (5, 10)), ((5, 9), (6, 9)), ((5, 9), (6, 8)), ((5, 9), (5 + 2**32, 9)), ((0, 1), (1, 0))],
    ids=["positions", "seeds", "seed plus position", "high seed words", "swapped"],
)
def test_two_places_share_nothing_whatever_the_shift(one: tuple[int, int], other: tuple[int, int]) -> None:
    """Not even shifted by some tokens: the hash must not be a function of a sum."""
    num = 2**16
    first, second = (
        uniform(noise([seed], [[position]], np.arange(num))[0, 0]) - 0.5 for seed, position in (one, other)
    )
    spectrum = np.fft.rfft(first) * np.conj(np.fft.rfft(second))
    correlations = np.fft.irfft(spectrum, num) / (num * np.var(first))
    assert np.abs(correlations).max() < 6 / math.sqrt(num)


def test_the_high_tail_has_its_true_weight() -> None:
    """High noise decides which rare token wins: a vocabulary of 150,000 reaches far into it at every pick."""
    sample = np.concatenate([noise([7], [[position]], np.arange(2**21))[0, 0] for position in range(4)])
    for limit in (6, 8, 10):
        expected = sample.size * -math.expm1(-math.exp(-limit))
        assert abs(np.sum(sample > limit) - expected) < 5 * math.sqrt(expected)
    assert len(set(sample[sample > 10].tolist())) > 0.9 * np.sum(sample > 10)  # spread, not a few steps


def unmix(y: int, key: int) -> int:
    def unshift(x: int, by: int) -> int:
        found = x
        for _ in range(32 // by):
            found = x ^ (found >> by)
        return found

    y = unshift(y, 16) * pow(0x846CA68B, -1, 2**32) & MASK32
    y = (unshift(y, 15) ^ key) * pow(0x7FEB352D, -1, 2**32) & MASK32
    return unshift(y, 16)


@pytest.mark.parametrize("bits", [0, 1, 255, 256, 2**31, MASK32 - 256, MASK32 - 255, MASK32 - 1, MASK32])
def test_no_hash_value_gives_infinite_noise(bits: int) -> None:
    """One token in sixteen million with infinite noise wins one pick in a hundred of a large vocabulary."""
    first = int(oracle.mix(0 + int(oracle.mix(3 + 0x9E3779B9))))
    second = int(oracle.mix(0 ^ int(oracle.mix(first + 0x85EBCA6B))))
    token_id = np.array([(unmix(bits, second) - first) % 2**32])
    assert int(oracle.noise_bits(0, 3, token_id)[0]) == bits
    found = noise([0], [[3]], token_id).item()
    assert -3 < found < 24
    assert abs(found - oracle.gumbel(0, 3, token_id).item()) < 1e-5


def test_a_few_ids_get_what_the_whole_vocabulary_gets() -> None:
    seeds, positions = [1, 99, 2**40], [[5, 6], [0, 1], [70, 3]]
    whole = noise(seeds, positions, np.arange(5000))
    ids = np.random.default_rng(0).integers(0, 5000, (3, 2, 33))
    some = noise(seeds, positions, ids)
    np.testing.assert_allclose(some, np.take_along_axis(whole, ids, axis=-1), atol=2e-6)


def test_the_shape_of_the_batch_changes_nothing() -> None:
    seeds, positions = [4, 5, 6], [[10, 11, 12], [10, 11, 12], [3, 4, 5]]
    together = noise(seeds, positions, np.arange(1001))
    for row, seed in enumerate(seeds):
        for column, position in enumerate(positions[row]):
            alone = noise([seed], [[position]], np.arange(1001))[0, 0]
            np.testing.assert_allclose(alone, together[row, column], atol=2e-6)


def test_seeds_count_modulo_two_to_the_64th() -> None:
    assert np.array_equal(np.array(seed_words([-1])), np.array(seed_words([2**64 - 1])))
    words = {tuple(np.array(seed_words([seed]))[0].tolist()) for seed in SEEDS}
    assert len(words) == len(SEEDS) - 1  # -1 and 2**64 - 1 are the same
