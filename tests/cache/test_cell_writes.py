"""Cells that a kernel writes in place, run as C++, against MLX's operations; and where the kernel is used."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from recurrent.cpp_kernels import CppKernels, cpp_folder, kernels  # noqa: F401  (fixtures)

from outrider import gpu_kernels
from outrider.cache import cell_kernels, cell_writes
from outrider.cache.cell_format import CellFormat
from outrider.cache.placement import Placement, block_tables
from outrider.cache.ragged_kv import KVSpec, LayerView, RaggedKV
from outrider.plan import BLOCK_SIZE, NUM_SPARE_BLOCKS


@pytest.fixture
def on_cuda(kernels: CppKernels, monkeypatch: pytest.MonkeyPatch) -> CppKernels:  # noqa: F811
    """MLX's device is taken for an NVIDIA GPU, whose kernels run as C++ in the order of their calls."""
    kernels.language = "CUDA"
    monkeypatch.setattr(gpu_kernels, "is_available", lambda: True)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setenv("MLX_USE_CUDA_GRAPHS", "0")
    for check in (cell_writes._agrees, cell_kernels._agrees):
        check.cache_clear()
    yield kernels
    for check in (cell_writes._agrees, cell_kernels._agrees):
        check.cache_clear()


@pytest.mark.parametrize(
    ("dim", "bits", "dtype"),
    [
        (64, None, mx.bfloat16),
        (96, None, mx.float32),
        (128, 16, mx.float32),  # bfloat16 cells beside a model in float32
        (64, 8, mx.bfloat16),
        (256, 8, mx.bfloat16),
        (128, 4, mx.bfloat16),
    ],
)
def test_cells_have_the_bits_that_mlx_writes(
    on_cuda: CppKernels, dim: int, bits: int | None, dtype: mx.Dtype
) -> None:
    own = CellFormat(dim, dtype, bits)
    assert cell_writes._num_wrong(own) == 0
    assert cell_writes.supports(own)


@pytest.mark.parametrize(
    ("bits", "old", "new"),
    [
        (None, "token < num_fed[row * num_fed_strides[0]]", "true"),  # padding is written
        (None, "* tables_strides[0] + column", "* 0 + column"),  # all rows have the first one's blocks
        (None, "cell % cells_of_block", "token"),
        (None, "group_z == 0 ? first_cells : second_cells", "first_cells"),
        (8, "* num_heads + head", "* num_heads"),
        (8, "+ 0.5f", "+ 0.0f"),
    ],
)
def test_a_kernel_that_is_wrong_is_not_used(
    on_cuda: CppKernels, caplog: pytest.LogCaptureFixture, bits: int | None, old: str, new: str
) -> None:
    own = CellFormat(64, mx.bfloat16, bits)
    assert cell_writes.supports(own)
    name = "write_cells" if bits is None else "write_quantized_cells"
    on_cuda.made[name].break_it(old, new)
    assert not cell_writes._agrees.__wrapped__(own)
    assert "cell-writing kernels are off by" in caplog.text


def written_layer(bits: int | None, width: int = 2) -> RaggedKV:
    """Two rows write `width` tokens each, twice."""
    kv = RaggedKV(KVSpec(2, 64, 64, mx.bfloat16, bits=bits))
    kv.resize_blocks(NUM_SPARE_BLOCKS + 3, BLOCK_SIZE)
    tables = block_tables([[NUM_SPARE_BLOCKS + 1, NUM_SPARE_BLOCKS], [NUM_SPARE_BLOCKS + 2]])
    for number, start in enumerate((BLOCK_SIZE - 3, BLOCK_SIZE - 3 + width)):
        starts, fed = mx.array([start, 5 + number]), mx.array([width, 1])
        place = Placement([0, 1], starts, fed, width, BLOCK_SIZE + 1, 0, tables=tables)
        keys, values = (
            mx.random.normal((2, 2, width, 64), key=key).astype(mx.bfloat16)
            for key in mx.random.split(mx.random.key(number), 2)
        )
        LayerView(kv, place).write(keys, values)
    return kv


@pytest.mark.parametrize("bits", [None, 8])
def test_a_layer_takes_one_launch_and_no_copy(
    on_cuda: CppKernels, monkeypatch: pytest.MonkeyPatch, bits: int | None
) -> None:
    assert cell_writes.supports(CellFormat(64, mx.bfloat16, bits))
    names = {"write_cells", "write_quantized_cells", "encode_cells"} & set(on_cuda.made)
    before = {name: len(on_cuda.made[name].calls) for name in names}
    kv = written_layer(bits)
    launches = {name: len(on_cuda.made[name].calls) - before[name] for name in names}
    used = "write_cells" if bits is None else "write_quantized_cells"
    assert launches == dict.fromkeys(names, 0) | {used: 2}  # there are two passes
    monkeypatch.setenv("MLX_USE_CUDA_GRAPHS", "1")
    want = written_layer(bits)
    assert len(on_cuda.made[used].calls) == before[used] + 2  # MLX's operations have written
    for got, by_mlx in zip(kv.arrays(), want.arrays(), strict=True):
        assert mx.array_equal(got[NUM_SPARE_BLOCKS:], by_mlx[NUM_SPARE_BLOCKS:])
        assert got[NUM_SPARE_BLOCKS:].any()


@pytest.mark.parametrize("setting", ["1", None])
def test_kernels_that_mlx_may_reorder_do_not_write_in_place(
    on_cuda: CppKernels, monkeypatch: pytest.MonkeyPatch, setting: str | None
) -> None:
    """With CUDA graphs, which MLX uses unless told otherwise, a read could come before the write."""
    own = CellFormat(64, mx.bfloat16)
    assert cell_writes.supports(own)
    if setting is None:
        monkeypatch.delenv("MLX_USE_CUDA_GRAPHS")
    else:
        monkeypatch.setenv("MLX_USE_CUDA_GRAPHS", setting)
    assert not cell_writes.supports(own)


def test_only_heads_and_blocks_are_written_in_place(on_cuda: CppKernels) -> None:
    assert not cell_writes.supports(CellFormat(320, mx.bfloat16))
    assert not cell_writes.supports(CellFormat(64, mx.bfloat16), cell_writes.MAX_VECTORS + 1)
    kv = RaggedKV(KVSpec(1, 64, 64, mx.bfloat16))
    kv.resize(2, 16)
    place = Placement([0, 1], mx.array([0, 0]), mx.array([1, 1]), 1, 1, 16)
    LayerView(kv, place).write(*[mx.ones((2, 1, 1, 64), mx.bfloat16)] * 2)
    assert "write_cells" not in on_cuda.made


def test_a_traced_pass_returns_the_memory_that_it_was_given() -> None:
    """What `gpu_kernels.write` relies on: `mx.depends` copies nothing, also in a trace."""

    def traced(cells: mx.array, new: mx.array) -> mx.array:
        (after,) = mx.depends([cells], [new.sum()])
        return after

    cells = mx.zeros((4, 4))
    mx.eval(cells)
    after = mx.compile(traced)(cells, mx.ones(3))
    mx.eval(after)
    np.array(cells, copy=False)[2, 3] = 7
    assert after[2, 3].item() == 7
