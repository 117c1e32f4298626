"""Which tokens of a prompt are read, by their scores."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.speculate.prompt_selection import CHUNK, LAST_CHUNKS, kept_positions


@given(st.integers(1, 700), st.floats(0.01, 1.0), st.integers(0, 99))
def test_whole_chunks_are_kept_in_order_and_the_ends_always(num_tokens: int, keep: float, seed: int) -> None:
    kept = kept_positions(np.random.default_rng(seed).random(num_tokens), keep)
    chunks = sorted({position // CHUNK for position in kept})
    assert kept == [p for p in range(num_tokens) if p // CHUNK in chunks]
    num_chunks = -(-num_tokens // CHUNK)
    assert {0, *range(max(0, num_chunks - LAST_CHUNKS), num_chunks)} <= set(chunks)
    fewest = min(num_chunks, 1 + LAST_CHUNKS)
    assert max(fewest, keep * num_chunks) <= len(chunks) < max(fewest, keep * num_chunks) + 1


def test_the_chunks_with_the_highest_mean_are_kept() -> None:
    scores = np.zeros(10 * CHUNK)
    scores[3 * CHUNK : 3 * CHUNK + 8] = 0.9  # a part of a chunk
    scores[6 * CHUNK : 7 * CHUNK] = 0.5
    assert {p // CHUNK for p in kept_positions(scores, 0.4)} == {0, 6, 8, 9}
    assert {p // CHUNK for p in kept_positions(scores, 0.5)} == {0, 3, 6, 8, 9}


@pytest.mark.parametrize("num_tokens", [1, CHUNK, 3 * CHUNK, 200])
def test_a_share_of_one_keeps_all(num_tokens: int) -> None:
    assert kept_positions(np.zeros(num_tokens), 1.0) == list(range(num_tokens))
