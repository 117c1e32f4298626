"""Quantised cells on GPUs: packed by the kernel, run as C++, and by MLX's operations."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from recurrent.cpp_kernels import CppKernels, cpp_folder, kernels  # noqa: F401  (fixtures)

from outrider import gpu_kernels
from outrider.cache import cell_kernels
from outrider.cache.cell_format import CellFormat
from outrider.cache.placement import Placement, block_tables
from outrider.cache.ragged_kv import KVSpec, LayerView, RaggedKV
from outrider.plan import BLOCK_SIZE, NUM_SPARE_BLOCKS


@pytest.fixture
def on_gpu(kernels: CppKernels, monkeypatch: pytest.MonkeyPatch) -> CppKernels:  # noqa: F811
    """MLX's device is taken for a GPU, whose kernels run as C++."""
    monkeypatch.setattr(gpu_kernels, "is_available", lambda: True)
    cell_kernels._agrees.cache_clear()
    yield kernels
    cell_kernels._agrees.cache_clear()


@pytest.mark.parametrize(
    ("language", "dim", "bits", "dtype"),
    [("Metal", 64, 8, mx.float32), ("CUDA", 256, 8, mx.bfloat16), ("Metal", 96, 4, mx.bfloat16)],
)
def test_a_number_is_off_by_half_a_step_at_most(
    on_gpu: CppKernels, language: str, dim: int, bits: int, dtype: mx.Dtype
) -> None:
    on_gpu.language = language
    group_size = CellFormat(dim, dtype, bits).group_size
    assert cell_kernels._largest_error(dim, bits, group_size, dtype) <= 0.501


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("+ 0.5f", "+ 0.0f"),  # rounds down
        (" * (1.0f + ROUNDING)", " * 0.99f"),  # some numbers are above the last step
        ("(lowest + not_finite)", "(lowest)"),
        ("lane ^ step", "lane"),  # each lane its own group
    ],
)
def test_a_kernel_that_is_wrong_is_not_used(on_gpu: CppKernels, old: str, new: str) -> None:
    assert cell_kernels.supports(64, 8, 64, mx.bfloat16)
    on_gpu.made["encode_cells"].break_it(old, new)
    assert not cell_kernels._agrees.__wrapped__(64, 8, 64, mx.bfloat16)


@pytest.mark.parametrize(("dim", "bits", "has_kernel"), [(64, 8, True), (64, 4, True), (192, 8, False)])
def test_packed_vectors_are_read_as_they_were_written(
    on_gpu: CppKernels, dim: int, bits: int, has_kernel: bool
) -> None:
    own = CellFormat(dim, mx.bfloat16, bits)
    assert own.is_packed
    vectors = mx.random.normal((2, 2, 3, dim), key=mx.random.key(1)).astype(mx.bfloat16)
    packed = own.encode(vectors)
    assert [(part.shape[-1], part.dtype) for part in packed] == list(own.parts)
    assert own.num_bytes == dim * bits // 8 + dim // 64 * 4
    off = mx.abs(own.decode(packed).astype(mx.float32) - vectors.astype(mx.float32)).max()
    assert off <= (0.04 if bits == 8 else 0.3)
    assert ("encode_cells" in on_gpu.made) == has_kernel


def test_a_group_that_is_not_finite_stays_so_without_the_kernel(on_gpu: CppKernels) -> None:
    own = CellFormat(192, mx.bfloat16, 8)
    vectors = mx.ones((1, 1, 1, 192), mx.bfloat16)
    vectors[..., 100] = mx.nan
    decoded = own.decode(own.encode(vectors))
    assert mx.isnan(decoded).sum().item() == 64


def test_keys_and_values_of_a_pass_are_packed_by_one_launch(on_gpu: CppKernels) -> None:
    """And written into the cells of their rows' blocks; padding is not."""
    kv = RaggedKV(KVSpec(2, 64, 64, mx.bfloat16, bits=8))
    kv.resize_blocks(NUM_SPARE_BLOCKS + 2, BLOCK_SIZE)
    first, second = NUM_SPARE_BLOCKS, NUM_SPARE_BLOCKS + 1
    tables = block_tables([[second], [first]])
    place = Placement([0, 1], mx.array([5, 0]), mx.array([2, 1]), 2, 7, 0, tables=tables)
    new = [mx.random.normal((2, 2, 2, 64), key=mx.random.key(i)).astype(mx.bfloat16) for i in range(2)]
    cell_kernels.supports(64, 8, 64, mx.bfloat16)
    num_before = len(on_gpu.made["encode_cells"].calls)
    LayerView(kv, place).write(*new)
    assert len(on_gpu.made["encode_cells"].calls) == num_before + 1
    for cells, vectors in zip(kv.cells, new, strict=True):
        (packed,) = cells.arrays
        want = cells.format.encode(vectors)[0]
        assert mx.array_equal(packed[second, :, 5:7], want[0])
        assert mx.array_equal(packed[first, :, :1], want[1, :, :1])
        untouched = np.array(packed[NUM_SPARE_BLOCKS:])
        untouched[1, :, 5:7] = untouched[0, :, :1] = 0
        assert not untouched.any()
