"""Quantised cells: their bytes, what they lose, and that every reader sees the same."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from outrider.cache.cell_format import CellFormat
from outrider.cache.hidden_cells import HiddenCells
from outrider.cache.placement import Placement, block_tables
from outrider.cache.prefix_store import PrefixStore
from outrider.cache.ragged_kv import KVSpec, LayerView, RaggedKV
from outrider.plan import BlockPiece, SaveCells

SIZE = 16  # cells of a block


def normal(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


@pytest.mark.parametrize(("dim", "group_size"), [(64, 64), (128, 64), (32, 32), (96, 32), (512, 64)])
def test_groups_have_64_elements_or_32(dim: int, group_size: int) -> None:
    assert CellFormat(dim, mx.bfloat16, 8).group_size == group_size


@pytest.mark.parametrize(("bits", "most", "most_of_float32"), [(8, 0.55, 0.29), (4, 0.29, 0.16)])
def test_cells_take_little_more_than_their_codes(bits: int, most: float, most_of_float32: float) -> None:
    plain = KVSpec(4, 128, 64, mx.bfloat16)
    assert plain.quantized(bits).bytes_per_cell <= most * plain.bytes_per_cell
    in_float32 = KVSpec(4, 128, 64, mx.float32)
    assert in_float32.quantized(bits).bytes_per_cell <= most_of_float32 * in_float32.bytes_per_cell


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_are_those_of_the_arrays(bits: int, dtype: mx.Dtype) -> None:
    kv = RaggedKV(KVSpec(2, 96, 64, dtype, bits=bits))
    kv.resize(3, 7)
    assert kv.num_bytes == sum(array.nbytes for array in kv.arrays()) == 24 * kv.spec.bytes_per_cell
    kv = RaggedKV(kv.spec)
    kv.resize_blocks(5, SIZE)
    assert kv.num_bytes == 5 * SIZE * kv.spec.bytes_per_cell
    assert len(kv.arrays()) == 6


@pytest.mark.parametrize("bits", [4, 8])
def test_an_element_is_off_by_half_a_step_at_most(bits: int) -> None:
    cells = CellFormat(128, mx.float32, bits)
    vectors = normal(3, 2, 5, 128) * mx.array([1e-3, 1.0, 300.0])[:, None, None, None]
    parts = cells.encode(vectors)
    assert [(part.shape[-1], part.dtype) for part in parts] == list(cells.parts)
    groups = np.array(vectors).reshape(-1, 64)
    errors = np.abs(np.array(cells.decode(parts)).reshape(-1, 64) - groups).max(axis=1)
    steps = np.ptp(groups, axis=1) / (2**bits - 1)
    assert (errors <= 1.01 * steps).all()
    assert np.median(errors / steps) <= 0.55


def test_16_bits_are_bfloat16_beside_float32_and_nothing_else() -> None:
    spec = KVSpec(2, 24, 40, mx.float32).quantized(16)  # no groups: any size will do
    assert spec.bytes_per_cell == 2 * 2 * (24 + 40)
    vectors = normal(2, 2, 3, 24)
    (part,) = spec.key_format.encode(vectors)
    assert part.dtype == mx.bfloat16
    assert mx.array_equal(spec.key_format.decode([part]), vectors.astype(mx.bfloat16).astype(mx.float32))
    for dtype in (mx.bfloat16, mx.float16):
        assert KVSpec(2, 24, 40, dtype).quantized(16) == KVSpec(2, 24, 40, dtype)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_group_that_is_not_finite_stays_so(bad: float) -> None:
    vectors = np.array(normal(2, 1, 1, 128))
    vectors[1, 0, 0, 70] = bad
    cells = CellFormat(128, mx.float32, 8)
    found = np.array(cells.decode(cells.encode(mx.array(vectors))))
    assert np.isnan(found[1, 0, 0, 64:]).all()
    assert np.isfinite(found[1, 0, 0, :64]).all()
    assert np.isfinite(found[0]).all()


def test_keys_or_values_that_do_not_divide_are_named() -> None:
    with pytest.raises(ValueError, match="values of 24 elements"):
        KVSpec(2, 32, 24, mx.float32).quantized(8)
    assert KVSpec(2, 32, 24, mx.float32).quantized(None).bits is None
    indexer = KVSpec(1, 128, 0, mx.float32).quantized(4)  # keys only
    assert indexer.value_format.bits is None
    assert indexer.bytes_per_cell == 64 + 16


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_readers_see_what_was_quantised_whatever_the_pass(bits: int, in_blocks: bool) -> None:
    spec = KVSpec(2, 64, 32, mx.float32, bits=bits)
    keys, values = normal(1, 2, 40, 64), normal(1, 2, 40, 32, seed=1)
    expected = [mx.dequantize(*mx.quantize(x, g, bits), g, bits) for x, g in ((keys, 64), (values, 32))]
    for chunks in ([40], [1] * 40, [7, 30, 3]):
        kv, start = RaggedKV(spec), 0
        if in_blocks:
            kv.resize_blocks(8, SIZE)
        else:
            kv.resize(3, 63)
        for size in chunks:
            tables = block_tables([[5, 2, 7]]) if in_blocks else None
            end = start + size
            arguments = [1], mx.array([start]), mx.array([size]), size, end, 63
            place = Placement(*arguments, tables=tables, block_size=SIZE)
            part = slice(start, end)
            found = LayerView(kv, place).update_and_fetch(keys[:, :, part], values[:, :, part])
            start = end
            for one, want in zip(found, expected, strict=True):
                assert mx.array_equal(one[:, :, :end], want[:, :, :end])


def test_blocks_keep_their_codes_through_the_prefix_store() -> None:
    specs = [KVSpec(2, 64, 64, mx.float32, bits=8), KVSpec(1, 128, 32, mx.bfloat16, bits=4)]
    buffers = [RaggedKV(spec) for spec in specs]
    for seed, kv in enumerate(buffers):
        kv.resize_blocks(6, SIZE)
        for cells in kv.cells:
            whole = normal(6, kv.spec.num_heads, SIZE, cells.format.dim, dtype=kv.spec.dtype, seed=seed)
            cells.arrays = list(cells.format.encode(whole))
    before = [[np.array(a.view(mx.uint16)) for a in kv.arrays()] for kv in buffers]
    store = PrefixStore(buffers, SIZE)
    store.save_row_blocks(
        [SaveCells(1, 0, 0, SIZE, row_block=3), SaveCells(2, 0, SIZE, SIZE + 5, row_block=4)]
    )
    store.settle([1, 2])
    assert store.num_bytes == (SIZE + 5) * sum(spec.bytes_per_cell for spec in specs)
    for i in (1, 2):
        store.from_host(i, store.to_host(i))  # as from disk
    for kv in buffers:
        kv.put([mx.zeros_like(array) for array in kv.arrays()])
    store.load_into_blocks([5, 2], [BlockPiece(1, 0, SIZE), BlockPiece(2, 0, 5)])
    for kv, arrays in zip(buffers, before, strict=True):
        for found, want in zip(kv.arrays(), arrays, strict=True):
            now = np.array(found.view(mx.uint16))
            np.testing.assert_array_equal(now[5], want[3])
            np.testing.assert_array_equal(now[2, :, :5], want[4, :, :5])


def test_hidden_states_have_the_bits_of_the_cells_and_8_at_least() -> None:
    place = Placement([0, 1], mx.array([0, 0]), mx.array([3, 3]), 3, 3, 7)
    hidden = normal(2, 3, 128)
    for kv_bits, most in ((None, 0), (16, 0.01), (8, 0.02), (4, 0.02)):
        cells = HiddenCells(128, mx.float32, kv_bits)
        cells.kv.resize(2, 7)
        cells.write(hidden, place)
        assert mx.abs(cells.read(place) - hidden).max() <= most
    assert HiddenCells(72, mx.float32, 16).kv.spec.bits == 16
    assert HiddenCells(72, mx.float32, 8).kv.spec.bits is None  # 36 elements divide into no groups
