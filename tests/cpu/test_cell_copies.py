"""Copies of cells out of rows' blocks, and the place of the best score."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from outrider.cache.prefix_store import PrefixStore
from outrider.cache.ragged_kv import KVSpec, RaggedKV
from outrider.cache.recurrent import RecurrentState, StateSpec
from outrider.cpu.extension import extension, loaded
from outrider.cpu.top_two import best
from outrider.plan import BLOCK_SIZE, SaveCells

pytestmark = pytest.mark.skipif(extension() is None, reason="no native extension: no compiler, or not Linux")

RANGES = [(2, 0, 64), (5, 3, 4), (0, 60, 64), (2, 0, 1)]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint32])
@pytest.mark.parametrize("num_buffers", [1, 3])
def test_copies_are_the_cells_of_each_range(num_buffers: int, dtype: mx.Dtype) -> None:
    buffers = [
        mx.random.randint(0, 1000, (6, 2, 64, 5), key=mx.random.key(i)).astype(dtype)
        for i in range(num_buffers)
    ]
    copies = loaded().copy_cells(buffers, RANGES)
    for copy, (block, first, end) in zip(copies, RANGES, strict=True):
        expected = mx.stack([buffer[block, :, first:end] for buffer in buffers])
        assert copy.dtype == dtype
        assert mx.array_equal(copy, expected)


@pytest.mark.parametrize("copy_cells", ["native", "mlx"])
def test_the_prefix_store_saves_rows_with_and_without_keys_and_values(copy_cells: str) -> None:
    kv, state = RaggedKV(KVSpec(2, 8, 4, mx.float32)), RecurrentState(StateSpec(((3,),), (mx.float32,)))
    kv.resize_blocks(6, BLOCK_SIZE)
    for seed, cells in enumerate(kv.cells):
        cells.arrays = [mx.random.normal(cells.arrays[0].shape, key=mx.random.key(seed))]
    native = loaded().copy_cells if copy_cells == "native" else None
    saves = [SaveCells(7, 0, 0, 64, row_block=3), SaveCells(8, 0, 64, 70, row_block=5)]
    for buffers in ([kv], [state], [kv, state]):
        store = PrefixStore(buffers, BLOCK_SIZE, native)
        store.save_row_blocks(saves)
        store.settle([7, 8])
        for block_id, block, end in ((7, 3, 64), (8, 5, 6)):
            found = [array.data.ravel() for array in store.to_host(block_id).values()]
            of_kv = kv.cells if kv in buffers else ()
            expected = [np.array(cells.arrays[0][block, :, :end]).ravel() for cells in of_kv]
            for copy, cells in zip(found, expected, strict=True):
                np.testing.assert_array_equal(copy, cells)


def test_a_copy_does_not_hold_the_buffers() -> None:
    buffer = mx.random.normal((6, 2, 64, 5))
    (copy,) = loaded().copy_cells([buffer], [(1, 0, 64)])
    mx.eval(copy)
    expected = np.array(buffer[1:2])
    buffer[:] = 0
    mx.eval(buffer)
    np.testing.assert_array_equal(np.array(copy), expected)


@pytest.mark.parametrize("bad", [(-1, 0, 1), (6, 0, 1), (0, -1, 1), (0, 0, 65), (0, 3, 3)])
def test_ranges_outside_of_the_buffers_are_refused(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="range"):
        loaded().copy_cells([mx.zeros((6, 2, 64, 5))], [bad])


def test_buffers_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="one shape"):
        loaded().copy_cells([mx.zeros((6, 2, 64, 5)), mx.zeros((6, 2, 64, 4))], [(0, 0, 1)])


def test_the_best_of_equal_scores_is_the_first() -> None:
    scores = mx.random.randint(0, 4, (5, 3, 1000), key=mx.random.key(0)).astype(mx.float32)
    assert mx.array_equal(best(scores), mx.argmax(scores, axis=-1))
