"""The native low-rank terms of adapters: what they compute, and what must not change a bit of it."""

from __future__ import annotations

from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest

from outrider.cpu.extension import extension
from outrider.cpu.kernel_switch import INSTRUCTIONS
from outrider.cpu.low_rank import NativeTerms

pytestmark = [
    pytest.mark.skipif(extension() is None, reason="no native extension: no compiler, or not Linux"),
    pytest.mark.usefixtures("as_before"),
]

SIZE, ROWS = 160, 96
RANKS = {1: 1, 2: 8, 4: 37}  # by id; adapter 3 does not change the layer
WITH_GAIN = 2


def random(*shape: int, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


A = [random(RANKS[i], SIZE, seed=i) if i in RANKS else None for i in range(5)]
B = [random(RANKS[i], ROWS, seed=10 + i) if i in RANKS else None for i in range(5)]
GAINS = [random(ROWS, seed=20) if i == WITH_GAIN else None for i in range(5)]
SHIFTS = [random(ROWS, seed=21) if i == WITH_GAIN else None for i in range(5)]


def terms() -> NativeTerms:
    return NativeTerms(A, B, GAINS, SHIFTS)


def adapted(ids: list[int], width: int = 3) -> np.ndarray:
    """Row i has the same tokens whatever the other rows are."""
    x = mx.stack([random(width, SIZE, seed=30 + i) for i in range(len(ids))])
    y = mx.stack([random(width, ROWS, seed=60 + i) for i in range(len(ids))])
    return np.array(terms().add(y, x, mx.array(ids)))


def expected(row: int, id: int, width: int = 3) -> np.ndarray:
    x, y = (
        np.array(random(width, size, seed=seed + row), np.float64) for size, seed in ((SIZE, 30), (ROWS, 60))
    )
    if id not in RANKS:
        return y
    gain = 1.0 if GAINS[id] is None else np.array(GAINS[id])
    shift = 0.0 if SHIFTS[id] is None else np.array(SHIFTS[id])
    return y * gain + x @ np.array(A[id]).T @ np.array(B[id]) + shift


def test_each_row_gets_the_terms_of_its_adapter() -> None:
    ids = [0, 1, 2, 3, 4, 4, 0, 2]
    found = adapted(ids)
    for row, id in enumerate(ids):
        want = expected(row, id)
        assert np.abs(found[row] - want).max() < 1e-5 * np.abs(want).max()


def test_rows_without_terms_keep_their_bits() -> None:
    found, plain = adapted([0, 4, 3]), adapted([0, 0, 0])
    assert np.array_equal(found[0], plain[0])
    assert np.array_equal(found[2], plain[2])
    assert not np.array_equal(found[1], plain[1])


def test_neighbours_widths_threads_and_instructions_change_no_bit(native: ModuleType) -> None:
    alone = {id: adapted([0, id])[1] for id in RANKS}
    for ids in ([4, 1, 2], [1, 2, 4], [2, 4, 1, 0, 1, 2, 4, 4, 4, 4, 4, 4]):
        assert np.array_equal(adapted(ids)[1], alone[ids[1]])
    wide = adapted([4, 4, 4, 4], width=100)  # enough for several threads
    for instructions in INSTRUCTIONS:
        if not native.use_instructions(instructions):
            continue
        for threads in (1, 2):
            native.set_num_threads(threads)
            assert np.array_equal(adapted([4, 4, 4, 4], width=100), wide)
            assert np.array_equal(adapted([0, 2])[1], alone[2])
    narrow = random(100, SIZE, seed=31)[None, 7:8], random(100, ROWS, seed=61)[None, 7:8]
    found = np.array(terms().add(narrow[1], narrow[0], mx.array([4])))
    assert np.array_equal(found[0, 0], wide[1, 7])


def test_wrong_shapes_are_refused(native: ModuleType) -> None:
    with pytest.raises(ValueError, match="multiples of 16"):
        native.LowRank([None, mx.ones((2, 24))], [None, mx.ones((2, 16))], [None] * 2, [None] * 2)
    with pytest.raises(ValueError, match="shape or type"):
        native.LowRank([None, mx.ones((2, 32))], [None, mx.ones((3, 16))], [None] * 2, [None] * 2)
    with pytest.raises(ValueError, match="lengths"):
        native.LowRank([None], [None, None], [None], [None])
    with pytest.raises(ValueError, match="another size"):
        terms().native(mx.ones((1, 1, 32)), mx.ones((1, 1, SIZE)), mx.zeros(1, mx.int32))
    with pytest.raises(ValueError, match="adapters"):
        terms().native(mx.ones((1, 1, ROWS)), mx.ones((1, 1, SIZE)), mx.zeros(2, mx.int32))
