"""Quantised matmuls of the native extension against NumPy, to the bit, and the layers that use them."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from numpy.typing import NDArray

from outrider.cpu.extension import extension
from outrider.cpu.quantized import BITS, GROUP_SIZES, CpuQuantizedLinear, keep_quantized
from outrider.cpu.threads import thread_counts

INSTRUCTIONS = ("avx512vnni", "avx2", "portable")
Floats = NDArray[np.float32]


@pytest.fixture(scope="module")
def native() -> ModuleType:
    found = extension()
    if found is None:
        pytest.skip("no native extension: no C++ compiler, or not Linux")
    return found


@pytest.fixture(params=INSTRUCTIONS)
def instructions(request: pytest.FixtureRequest, native: ModuleType) -> Iterator[str]:
    if not native.use_instructions(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    assert native.use_instructions("")


def weights(
    num_rows: int, size: int, bits: int, group_size: int, dtype: mx.Dtype = mx.float16, seed: int = 0
) -> tuple[mx.array, mx.array, mx.array]:
    dense = np.random.default_rng(seed).standard_normal((num_rows, size)).astype(np.float32)
    codes, scales, biases = mx.quantize(mx.array(dense), group_size=group_size, bits=bits)
    return codes, scales.astype(dtype), biases.astype(dtype)


def tokens(num_tokens: int, size: int, seed: int = 1) -> Floats:
    """Numbers whose sizes differ from block to block."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_tokens, size)) * np.exp(rng.uniform(-3, 3, (1, size)))
    return x.astype(np.float32)


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c with one rounding. The product is exact in float64; the sum rounds twice in rare cases."""
    return np.asarray(a.astype(np.float64) * b + c, np.float32)


def expected_product(
    x: Floats, weight: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int
) -> Floats:
    ones, zeros = mx.ones(scales.shape), mx.zeros(scales.shape)
    codes = np.array(mx.dequantize(weight, ones, zeros, group_size=group_size, bits=bits)).astype(np.int64)
    scale, bias = np.array(scales.astype(mx.float32)), np.array(biases.astype(mx.float32))
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(-1)
    inverse = np.where(
        largest > 1e-30, np.float32(127) / np.maximum(largest, np.float32(1e-30)), np.float32(0)
    )
    scaled = blocks * inverse[..., None].astype(np.float32)
    high = np.rint(scaled)
    rounded = (high * 128 + np.rint((scaled - high) * 128)).astype(np.int64)
    token_scale = np.where(inverse > 0, largest / np.float32(127 * 128), np.float32(0)).astype(np.float32)
    token_sum = token_scale * rounded.sum(-1).astype(np.float32)
    y = np.zeros((len(x), len(codes)), np.float32)
    for block in range(blocks.shape[1]):
        group = block * 32 // group_size
        total = (rounded[:, block] @ codes[:, block * 32 : block * 32 + 32].T).astype(np.float32)
        y = fma(total, scale[None, :, group] * token_scale[:, block, None], y)
        y = fma(bias[None, :, group], token_sum[:, block, None], y)
    return y


def product(native: ModuleType, x: Floats, parts: tuple[mx.array, ...], group_size: int, bits: int) -> Floats:
    return np.array(native.quantized_matmul(mx.array(x), *parts, group_size, bits))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_products_are_those_of_numpy(
    native: ModuleType, instructions: str, bits: int, group_size: int
) -> None:
    for num_rows, size, num_tokens in ((5, 128, 1), (16, 256, 3), (35, 1152, 9), (33, 2176, 17)):
        parts = weights(num_rows, size, bits, group_size)
        x = tokens(num_tokens, size)
        found = product(native, x, parts, group_size, bits)
        expected = expected_product(x, *parts, group_size, bits)
        assert np.array_equal(found, expected), (num_rows, size, num_tokens)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_scales_of_every_dtype(native: ModuleType, instructions: str, dtype: mx.Dtype) -> None:
    parts = weights(40, 320, 4, 32, dtype)
    x = tokens(4, 320)
    assert np.array_equal(product(native, x, parts, 32, 4), expected_product(x, *parts, 32, 4))


def test_small_and_special_scales_of_float16(native: ModuleType, instructions: str) -> None:
    codes, scales, biases = weights(16, 64, 4, 32)
    scales = mx.array(np.array([[6e-8, 1e-5], [65504, -2.5]] * 8, np.float16))
    x = tokens(2, 64)
    parts = (codes, scales, biases)
    assert np.array_equal(product(native, x, parts, 32, 4), expected_product(x, *parts, 32, 4))


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_a_token_does_not_depend_on_others_or_on_threads(native: ModuleType, bits: int) -> None:
    parts = weights(600, 640, bits, 64)
    x = tokens(70, 640)
    whole = product(native, x, parts, 64, bits)
    for num_threads in (1, 2, 5):
        native.set_num_threads(num_threads)
        for begin, end in ((0, 1), (3, 5), (7, 14), (1, 70), (0, 70)):
            assert np.array_equal(product(native, x[begin:end], parts, 64, bits), whole[begin:end])
    native.set_num_threads(thread_counts({}).max)


def test_products_are_close_to_float32(native: ModuleType) -> None:
    parts = weights(64, 2048, 8, 32, mx.float32)
    x = np.random.default_rng(2).standard_normal((8, 2048)).astype(np.float32)
    exact = x @ np.array(mx.dequantize(*parts, group_size=32, bits=8)).T
    error = product(native, x, parts, 32, 8) - exact
    # A step of the codes is about 2 / 127 / 128, the root mean square of rounding 1 / sqrt(12) of it.
    assert np.sqrt(np.mean(error**2) / np.mean(exact**2)) < 5e-5


def test_zeros_infinities_and_nan(native: ModuleType, instructions: str) -> None:
    parts = weights(16, 64, 4, 32)
    x = np.zeros((4, 64), np.float32)
    x[1, 5], x[2, 40], x[3, 7] = np.nan, np.inf, 1e-38
    found = product(native, x, parts, 32, 4)
    assert not found[0].any()
    assert np.isnan(found[1]).all()
    assert np.isnan(found[2]).all()
    assert not found[3].any()


def test_shapes_and_strides(native: ModuleType) -> None:
    parts = weights(24, 96, 4, 32)
    x = mx.array(tokens(30, 96)).reshape(5, 6, 96)
    whole = native.quantized_matmul(x, *parts, 32, 4)
    assert whole.shape == (5, 6, 24)
    assert mx.array_equal(native.quantized_matmul(x[:, ::2], *parts, 32, 4), whole[:, ::2])
    every_other = [part[::2] for part in parts]
    assert mx.array_equal(native.quantized_matmul(x, *every_other, 32, 4), whole[..., ::2])
    compiled = mx.compile(lambda x: native.quantized_matmul(x, *parts, 32, 4) + 1)
    assert mx.array_equal(compiled(x), whole + 1)
    assert native.quantized_matmul(mx.zeros((0, 96)), *parts, 32, 4).shape == (0, 24)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bits": 7}, "no weights of 7 bits"),
        ({"group_size": 48}, "not 48"),
        ({"group_size": 64}, "groups of 64 do not divide rows of 96"),
        ({"x": mx.zeros((2, 96), mx.float16)}, "tokens must be float32"),
        ({"scales": mx.zeros((24, 3), mx.int32)}, "float32, float16 or bfloat16"),
        ({"scales": mx.zeros((24, 4), mx.float16)}, "do not belong together"),
        ({"biases": mx.zeros((23, 3), mx.float16)}, "do not belong together"),
        ({"weight": mx.zeros((24, 11), mx.uint32)}, "do not belong together"),
    ],
)
def test_bad_weights_are_refused(native: ModuleType, change: dict[str, object], reason: str) -> None:
    weight, scales, biases = weights(24, 96, 4, 32)
    given = {"x": mx.zeros((2, 96)), "weight": weight, "scales": scales, "biases": biases}
    given |= {"group_size": 32, "bits": 4} | change  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=reason):
        native.quantized_matmul(*given.values())


def test_bad_experts_are_refused(native: ModuleType) -> None:
    parts = [part[None] for part in weights(24, 96, 4, 32)]
    for expert in (-1, 1):
        with pytest.raises((ValueError, RuntimeError), match="no such expert"):
            mx.eval(native.gather_quantized_matmul(mx.zeros((2, 96)), *parts, mx.array([0, expert]), 32, 4))


# -- layers ----------------------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self, bits: int, mode: str = "affine") -> None:
        super().__init__()
        mx.random.seed(3)
        self.linear = nn.Linear(128, 48)
        self.embedding = nn.Embedding(50, 128)
        self.experts = SwitchLinear(128, 48, 5)
        nn.quantize(self, 32, bits, mode=mode)


@pytest.mark.parametrize("bits", BITS)
def test_layers_compute_what_mlx_computes(native: ModuleType, bits: int) -> None:
    layers = Layers(bits)
    x, ids = mx.array(tokens(6, 128)), mx.array([[3, 49], [0, 7]])
    chosen = mx.array([[0, 4], [2, 2], [1, 0], [4, 3], [0, 0], [3, 1]])
    before = layers.linear(x), layers.embedding(ids), layers.embedding.as_linear(x)
    experts_before = layers.experts(x[:, None, None], chosen)
    assert keep_quantized(layers) == []
    assert isinstance(layers.linear, CpuQuantizedLinear)
    assert isinstance(layers.experts, QuantizedSwitchLinear)
    after = layers.linear(x), layers.embedding(ids), layers.embedding.as_linear(x)
    experts_after = layers.experts(x[:, None, None], chosen)
    for one, other in zip((*before, experts_before), (*after, experts_after), strict=True):
        assert one.shape == other.shape
        assert mx.abs(one - other).max() < 3e-4 * mx.abs(one).max()
    assert mx.array_equal(before[1], after[1]), "embeddings are not rounded"


def test_an_expert_does_not_depend_on_the_other_tokens(native: ModuleType) -> None:
    layers = Layers(4)
    keep_quantized(layers)
    x = mx.array(tokens(40, 128))[:, None, None]
    chosen = mx.array(np.random.default_rng(5).integers(0, 5, (40, 2)))
    whole = layers.experts(x, chosen)
    for i in (0, 17, 39):
        assert mx.array_equal(layers.experts(x[i : i + 1], chosen[i : i + 1])[0], whole[i])


def test_formats_without_native_operations_are_named(native: ModuleType) -> None:
    layers = Layers(4, mode="mxfp4")
    assert "linear" in keep_quantized(layers)
    assert type(layers.linear) is nn.QuantizedLinear
