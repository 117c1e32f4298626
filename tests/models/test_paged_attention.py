"""Attention over blocks: the GPU kernels, run as C++, against MLX's operations; and which layers use them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from cuda_kernels import attention_in_cpp
from recurrent.cpp_kernels import CppKernels, cpp_folder, kernels  # noqa: F401  (fixtures)

from outrider import gpu_kernels
from outrider.cache.placement import Placement, block_tables
from outrider.cache.ragged_kv import KVSpec
from outrider.models import attention_check, attention_kernels, cuda_attention, paged_attention
from outrider.models.trunk import Trunk, TrunkCache
from outrider.plan import BLOCK_SIZE, NUM_SPARE_BLOCKS
from tiny_models import tiny_model

ALL_CASES = attention_check.CASES


@pytest.fixture
def on_gpu(kernels: CppKernels, monkeypatch: pytest.MonkeyPatch) -> CppKernels:  # noqa: F811
    """MLX's device is taken for a GPU, whose kernels run as C++."""
    monkeypatch.setattr(gpu_kernels, "is_available", lambda: True)
    monkeypatch.setattr(
        attention_check, "CASES", attention_check.CASES[:2]
    )  # the others take long to compile
    attention_kernels.agrees.cache_clear()
    yield kernels
    attention_kernels.agrees.cache_clear()


@pytest.fixture
def on_tensor_cores(on_gpu: CppKernels, monkeypatch: pytest.MonkeyPatch) -> CppKernels:
    on_gpu.language = "CUDA"
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    for name in ("PLAIN", "QUANTIZED"):
        monkeypatch.setattr(cuda_attention, name, attention_in_cpp(getattr(cuda_attention, name)))
    return on_gpu


@pytest.mark.parametrize(
    ("language", "dtype", "bits", "dim"),
    [
        ("Metal", mx.float32, None, 64),
        ("CUDA", mx.bfloat16, None, 96),
        ("Metal", mx.bfloat16, 8, 64),
        ("CUDA", mx.float32, 4, 128),
    ],
)
def test_the_kernels_agree_with_mlx(
    on_gpu: CppKernels, language: str, dtype: mx.Dtype, bits: int | None, dim: int
) -> None:
    """Rows of 3, 100 and SPLIT + 40 cells, with and without a window and sinks."""
    on_gpu.language = language
    assert attention_kernels.agrees(dim, dtype, bits)
    own = {"attention_parts"} if bits is None else {"quantized_attention_parts", "encode_cells"}
    assert set(on_gpu.made) == own | {"attention_merge"}


@pytest.mark.parametrize(("dim", "bits"), [(64, None), (192, None), (64, 8), (128, 4)])
def test_tensor_cores_agree_with_mlx(on_tensor_cores: CppKernels, dim: int, bits: int | None) -> None:
    assert attention_kernels.agrees(dim, mx.bfloat16, bits)
    own = {"tensor_attention_parts"} if bits is None else {"tensor_quantized_attention_parts", "encode_cells"}
    assert set(on_tensor_cores.made) == own | {"attention_merge"}


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        ("attention_parts", "own <= last_cell[j]", "own < end"),
        ("attention_parts", "tables[row * num_columns", "tables[0 * num_columns"),
        ("attention_parts", "total[j] = FMA(total[j], factor, weights[j])", "total[j] += weights[j]"),
        ("attention_merge", "s < num_splits; ++s", "s < 1; ++s"),
        ("attention_merge", "whole = EXP2(sink - top)", "whole = 0"),
    ],
)
def test_a_kernel_that_is_wrong_is_not_used(
    on_gpu: CppKernels, caplog: pytest.LogCaptureFixture, kernel: str, old: str, new: str
) -> None:
    assert attention_kernels.agrees(64, mx.float32, None)
    on_gpu.made[kernel].break_it(old, new)
    assert not attention_kernels.agrees.__wrapped__(64, mx.float32, None)
    assert "attention kernels are off by" in caplog.text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("cell <= last_cell", "cell < end"),
        ("tables[row * num_columns", "tables[0 * num_columns"),
        ("weights[m][i / 2][1]", "weights[m][i / 2][0]"),
        ("FMA(shared_total[g][j], share, whole)", "whole + shared_total[g][j]"),
        ("i % 2 ? 0x7632 : 0x5410", "i % 2 ? 0x5410 : 0x7632"),
    ],
)
def test_a_tensor_kernel_that_is_wrong_is_not_used(on_tensor_cores: CppKernels, old: str, new: str) -> None:
    assert attention_kernels.agrees(64, mx.bfloat16, None)
    on_tensor_cores.made["tensor_attention_parts"].break_it(old, new)
    assert not attention_kernels.agrees.__wrapped__(64, mx.bfloat16, None)


def test_the_kernels_for_short_rows_and_for_many_queries_are_checked(
    on_tensor_cores: CppKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_check, "CASES", ALL_CASES)
    assert attention_kernels.agrees(64, mx.bfloat16, None)
    whole, parts = (on_tensor_cores.made[name] for name in ("tensor_attention", "tensor_attention_parts"))
    assert (len(whole.calls), len(parts.calls)) == (2, 3)
    whole.break_it("whole > 0 ? own[i] / whole", "whole > 0 ? own[i]")
    assert not attention_kernels.agrees.__wrapped__(64, mx.bfloat16, None)


def attend(queries: mx.array, keys: mx.array, values: mx.array, place: Placement) -> mx.array:
    spec = KVSpec(2, 64, 64, keys.dtype)
    return attention_kernels.attend(queries, [keys, values], spec, place, 0.125, 0, None)


def random_pass(
    lengths: list[int], width: int, num_heads: int = 4, dtype: mx.Dtype = mx.float32
) -> tuple[list[mx.array], Placement]:
    """Queries and cells of rows whose blocks lie about in the buffers, and the pass's placement."""
    num = [-(-(length + width) // BLOCK_SIZE) for length in lengths]
    order = np.random.default_rng(3).permutation(sum(num)) + NUM_SPARE_BLOCKS
    tables = np.split(order, np.cumsum(num)[:-1])
    shape = (NUM_SPARE_BLOCKS + sum(num), 2, BLOCK_SIZE, 64)
    mx.random.seed(4)
    keys, values = mx.random.normal(shape).astype(dtype), mx.random.normal(shape).astype(dtype)
    queries = mx.random.normal((len(lengths), num_heads, width, 64)).astype(dtype)
    place = Placement(
        range(len(lengths)), mx.array(lengths), mx.full((len(lengths),), width, mx.int32), width,
        max(lengths) + width, 0, tables=block_tables([table.tolist() for table in tables]),
    )  # fmt: skip
    return [queries, keys, values], place


def test_a_query_has_the_same_bits_whatever_is_beside_it(on_gpu: CppKernels) -> None:
    """Alone, in a wider pass, and beside a row so long that the splits are merged."""
    lengths, width = [70, 290, 5], 3
    (queries, keys, values), place = random_pass(lengths, width)
    together = attend(queries, keys, values, place)
    assert "attention_merge" in on_gpu.made
    assert place.tables is not None
    for row, length in enumerate(lengths):
        for own_width in (1, 3):
            own = Placement(
                [0], mx.array([length]), mx.array([own_width]), own_width, length + own_width, 0,
                tables=place.tables[row : row + 1],
            )  # fmt: skip
            alone = queries[row : row + 1, :, :own_width]
            got = attend(alone, keys, values, own)
            assert mx.array_equal(got[0], together[row, :, :own_width])


def test_a_query_has_the_same_bits_on_tensor_cores(on_tensor_cores: CppKernels) -> None:
    """Alone, and in a pass whose queries are more than one tile."""
    (queries, keys, values), place = random_pass([70, 290], 9, dtype=mx.bfloat16)
    together = attend(queries, keys, values, place)
    assert place.tables is not None
    for row, length in enumerate((70, 290)):
        own = Placement(
            [0], mx.array([length]), mx.array([2]), 2, length + 2, 0, tables=place.tables[row : row + 1]
        )
        got = attend(queries[row : row + 1, :, :2], keys, values, own)
        assert mx.array_equal(got[0], together[row, :, :2])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_cells_past_a_row_are_not_read(on_tensor_cores: CppKernels, dtype: mx.Dtype) -> None:
    """They may hold anything: here they are not numbers."""
    (queries, keys, values), place = random_pass([40], 2, dtype=dtype)
    want = attend(queries, keys, values, place)
    assert place.tables is not None
    block = int(place.tables[0, 0])
    keys[block, :, 42:], values[block, :, 42:] = mx.nan, mx.nan
    got = attend(queries, keys, values, place)
    assert mx.array_equal(got, want)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_padding_rows_give_finite_numbers(on_tensor_cores: CppKernels, dtype: mx.Dtype) -> None:
    (queries, keys, values), _ = random_pass([9, 30], 2, dtype=dtype)
    tables = block_tables([[NUM_SPARE_BLOCKS], []])
    fed = mx.array([2, 0])
    padded = Placement([0, 1], mx.array([9, 1]), fed, 2, 11, 0, tables=tables)
    got = attend(queries, keys, values, padded)
    assert mx.isfinite(got).all()


@pytest.mark.parametrize("kv_bits", [None, 8])
def test_a_model_on_a_gpu_reads_blocks(on_gpu: CppKernels, kv_bits: int | None) -> None:
    """A whole pass over rows in blocks gives what a pass over slots gives."""
    model = tiny_model("llama", head_dim=64)
    trunk = Trunk(model, 256)
    trunk.use_kv_bits(kv_bits)
    want = hidden_of(trunk, in_blocks=False)
    paged_attention.use_paged_attention(model)
    assert trunk.reads_blocks
    got = hidden_of(trunk, in_blocks=True)
    np.testing.assert_allclose(np.array(got), np.array(want), atol=1e-4)
    for _, module in model.named_modules():
        module.__class__ = paged_attention.plain_class(type(module))
    assert not trunk.reads_blocks


@pytest.fixture
def on_cuda(on_tensor_cores: CppKernels) -> CppKernels:
    paged_attention.takes_numbers.cache_clear()
    yield on_tensor_cores
    paged_attention.takes_numbers.cache_clear()


@pytest.mark.parametrize("in_blocks", [False, True])
def test_on_cuda_all_layers_share_a_mask_of_numbers(
    on_cuda: CppKernels, monkeypatch: pytest.MonkeyPatch, in_blocks: bool
) -> None:
    """MLX would make numbers of a mask of booleans in each layer, for each head."""
    model = tiny_model("llama", head_dim=64)
    trunk = Trunk(model, 256)
    want = hidden_of(trunk, in_blocks)
    paged_attention.use_paged_attention(model)
    masks = []
    of_mlx = mx.fast.scaled_dot_product_attention

    def noted(*args: mx.array, mask: mx.array, **more: object) -> mx.array:
        masks.append(mask)
        return of_mlx(*args, mask=mask, **more)

    assert paged_attention.takes_numbers(mx.float32)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", noted)
    got = hidden_of(trunk, in_blocks)
    np.testing.assert_allclose(np.array(got), np.array(want), atol=1e-4)
    num_layers, num_passes = len(trunk.layout), 1 if in_blocks else 2  # blocks: the second is our kernel's
    assert len(masks) == num_layers * num_passes
    assert len({id(mask) for mask in masks}) == num_passes
    assert {mask.dtype for mask in masks} == {mx.float32}


def test_a_mask_of_numbers_that_mlx_takes_for_another_is_not_used(
    on_cuda: CppKernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    of_mlx = mx.fast.scaled_dot_product_attention

    def wrong(*args: mx.array, mask: mx.array, **more: object) -> mx.array:
        return of_mlx(*args, mask=mask if mask.dtype == mx.bool_ else None, **more)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", wrong)
    assert not paged_attention.takes_numbers(mx.float32)
    assert "masked-attention kernels are off by" in caplog.text


def test_a_mask_that_a_model_has_made_stays() -> None:
    place = Placement([0], mx.array([3]), mx.array([2]), 2, 5, 16)
    assert place.added_to_scores(place.mask(None) & True, mx.float32) is None
    added = place.added_to_scores(place.mask(4), mx.float16)
    assert added is not None
    assert added.dtype == mx.float16
    assert (added == 0).tolist() == place.mask(4).tolist()
    assert mx.isneginf(added).tolist() == mx.logical_not(place.mask(4)).tolist()


def hidden_of(trunk: Trunk, in_blocks: bool) -> mx.array:
    """The hidden states of the second of two passes over two rows."""
    cache = TrunkCache(trunk.layout)
    tables = block_tables([[3, 2], [5, 4]]) if in_blocks else None
    for buffers in cache.buffers():
        if in_blocks:
            buffers.resize_blocks(6, BLOCK_SIZE)
        else:
            buffers.resize(2, 128)
    hidden = mx.zeros(0)
    for starts, width in (([0, 0], 70), ([70, 70], 3)):
        fed = mx.array([width, width])
        tokens = mx.arange(2 * width).reshape(2, width) % 50
        place = Placement([0, 1], mx.array(starts), fed, width, starts[0] + width, 128, tables=tables)
        hidden = trunk.hidden(tokens, cache, place)
        cache.commit(fed)
        mx.eval(hidden)
    return hidden
