"""Keys and values that one native operation writes: to the bit what MLX's operations write."""

from __future__ import annotations

from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest

from outrider.cache.hidden_cells import HiddenCells
from outrider.cache.placement import Placement, block_tables
from outrider.cache.ragged_kv import KVSpec, RaggedKV
from outrider.cpu.cells import native_write_cells
from outrider.plan import NUM_SPARE_BLOCKS

BLOCK_SIZE, BLOCKS_OF_ROW, ROWS, WIDTH = 8, 4, 3, 5
CAPACITY = BLOCK_SIZE * BLOCKS_OF_ROW
TABLES = (np.random.default_rng(0).permutation(ROWS * BLOCKS_OF_ROW) + NUM_SPARE_BLOCKS).reshape(ROWS, -1)

pytestmark = pytest.mark.usefixtures("native")


def placed(starts: list[int], num_fed: list[int], in_blocks: bool) -> Placement:
    tables = block_tables([own.tolist() for own in TABLES]) if in_blocks else None
    end = max(map(sum, zip(starts, num_fed, strict=True)))
    arrays = mx.array(starts), mx.array(num_fed)
    return Placement(
        range(ROWS), *arrays, WIDTH, min(end, CAPACITY), CAPACITY, tables=tables, block_size=BLOCK_SIZE
    )


def buffers_of(kv: RaggedKV, in_blocks: bool) -> RaggedKV:
    if in_blocks:
        kv.resize_blocks(NUM_SPARE_BLOCKS + TABLES.size, BLOCK_SIZE)
    else:
        kv.resize(ROWS, CAPACITY)
    return kv


def same_cells(one: RaggedKV, other: RaggedKV, in_blocks: bool) -> bool:
    """Without the spare blocks, or the slots' cell for padding, which hold junk."""
    own = slice(NUM_SPARE_BLOCKS, None) if in_blocks else (slice(None), slice(None), slice(CAPACITY))
    pairs = zip(one.arrays(), other.arrays(), strict=True)
    return all(bool(mx.array_equal(a[own].view(mx.uint8), b[own].view(mx.uint8))) for a, b in pairs)


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("bits", [None, 16, 8, 4])
@pytest.mark.parametrize(("num_heads", "dim"), [(1, 96), (3, 64)])
def test_cells_are_those_that_mlx_writes(num_heads: int, dim: int, bits: int | None, in_blocks: bool) -> None:
    spec = KVSpec(num_heads, dim, dim, mx.float32, bits=bits)
    plain = buffers_of(RaggedKV(spec), in_blocks)
    native = buffers_of(RaggedKV(spec, native_write_cells()), in_blocks)
    numbers = np.random.default_rng(1)
    for number in range(12):
        starts = numbers.integers(0, CAPACITY - WIDTH, ROWS).tolist()
        place = placed(starts, numbers.integers(0, WIDTH + 1, ROWS).tolist(), in_blocks)
        # As a layer makes them: by token, turned into heads. No vector follows the one before.
        by_token = mx.random.normal((2, ROWS, WIDTH, num_heads, dim), key=mx.random.key(number))
        keys, values = (one.swapaxes(1, 2) for one in by_token)
        plain.write(keys, values, place)
        native.write(keys, values, place)
        assert same_cells(native, plain, in_blocks)
    assert any(bool(mx.any(array[NUM_SPARE_BLOCKS:])) for array in native.arrays())


def test_elements_that_do_not_follow_each_other_are_written_too() -> None:
    spec = KVSpec(2, 32, 32, mx.float32)
    place = placed([0, 3, 7], [5, 2, 1], in_blocks=True)
    keys, values = (
        mx.random.normal((ROWS, 2, 32, WIDTH), key=mx.random.key(i)).swapaxes(2, 3) for i in range(2)
    )
    kvs = [buffers_of(RaggedKV(spec, write), True) for write in (None, native_write_cells())]
    for kv in kvs:
        kv.write(keys, values, place)
    assert same_cells(*kvs, in_blocks=True)


def test_a_token_past_its_row_s_blocks_is_written_nowhere() -> None:
    """A draft that goes deeper than the row's own depth."""
    kv = buffers_of(RaggedKV(KVSpec(1, 32, 32, mx.float32), native_write_cells()), in_blocks=True)
    before = [np.array(array) for array in kv.arrays()]
    place = placed([CAPACITY - 1] * ROWS, [1] * ROWS, in_blocks=True)
    place.starts, place.num_fed = mx.array([CAPACITY, CAPACITY + 3, CAPACITY - 1]), mx.array([3, 1, 4])
    ones = mx.ones((ROWS, 1, WIDTH, 32))
    kv.write(ones, ones, place)
    for array, old in zip(kv.arrays(), before, strict=True):
        changed = np.argwhere((np.array(array) != old).any(axis=(1, 3)))
        assert changed.tolist() == [[TABLES[2][-1], BLOCK_SIZE - 1]]


def test_buffers_are_written_in_place_also_after_attention_has_read_them(native: ModuleType) -> None:
    """A step may have two passes. What the first one reads is still held when the second one writes."""
    kv = RaggedKV(KVSpec(1, 64, 64, mx.float32, bits=16), native_write_cells())
    kv.resize_blocks(NUM_SPARE_BLOCKS + ROWS, 64)
    tables = block_tables([[NUM_SPARE_BLOCKS + row] for row in range(ROWS)])
    queries, vectors = mx.random.normal((ROWS, 1, 3, 64)), mx.random.normal((ROWS, 1, 1, 64))
    mx.eval(queries, vectors, kv.arrays())
    before, num_passes = native.num_buffer_copies(), 60
    for start in range(num_passes):
        starts, fed = mx.full(ROWS, start, mx.int32), mx.ones(ROWS, mx.int32)
        place = Placement(range(ROWS), starts, fed, 1, 64, 64, tables=tables, block_size=64)
        kv.write(vectors, vectors, place)
        mx.async_eval(native.attend_cells(queries, kv.arrays(), starts, fed, tables, True, 0, 0.1))
    mx.eval(kv.arrays())
    # Without the holds nearly all would be copied. Now and then MLX is just about to let go of one.
    assert native.num_buffer_copies() - before < 0.2 * 2 * num_passes


def test_hidden_states_are_read_as_they_were_written() -> None:
    place = placed([0, 3, 7], [5, 2, 1], in_blocks=True)
    hidden = mx.random.normal((ROWS, WIDTH, 128))
    cells = [HiddenCells(128, mx.float32, 16, write) for write in (None, native_write_cells())]
    for one in cells:
        buffers_of(one.kv, in_blocks=True)
        one.write(hidden, place)
    plain, native = (np.array(one.read(place)) for one in cells)
    for row, num in enumerate((5, 2, 1)):
        np.testing.assert_array_equal(native[row, :num], plain[row, :num])
        np.testing.assert_allclose(native[row, :num], np.array(hidden[row, :num]), rtol=0.01)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"values": mx.zeros((2, 1, 1, 64))}, "float32 .rows, heads, width, dim."),
        ({"keys": mx.zeros((2, 1, 1, 32), mx.float16)}, "float32 .rows, heads, width, dim."),
        ({"buffers": [mx.zeros((4, 2, 8, 32))] * 2}, "buffers"),
        ({"buffers": []}, "no buffers"),
        ({"starts": mx.zeros(3, mx.int32)}, "starts"),
        ({"num_fed": mx.zeros(2)}, "fed counts"),
        ({"places": mx.zeros((2, 1), mx.int32)}, "places"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    change: dict[str, object], reason: str, native: ModuleType
) -> None:
    arrays = {
        "keys": mx.zeros((2, 1, 1, 32)),
        "values": mx.zeros((2, 1, 1, 32)),
        "buffers": [mx.zeros((4, 1, 8, 32))] * 2,
        "starts": mx.zeros(2, mx.int32),
        "num_fed": mx.ones(2, mx.int32),
        "places": mx.zeros((2, 2), mx.int32),
    } | change
    with pytest.raises(ValueError, match=reason):
        native.write_cells(*arrays.values(), True)
