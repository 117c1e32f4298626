"""Quantised matmuls of the native extension against NumPy, to the bit, and the layers that use them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product as product_of
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from cpu.quantized_products import Weights, expected_product, product, tokens, weights
from outrider.cpu.quantized import (
    BITS,
    GROUP_SIZES,
    CpuQuantizedLinear,
    keep_quantized,
    linear_rows,
    new_linear,
)

FLOAT_FORMATS = [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]  # mode, bits, group size
FORMATS = [
    *(("affine", bits, group_size) for bits, group_size in product_of(BITS, GROUP_SIZES)),
    *FLOAT_FORMATS,
]
FORMATS_OF_MLX = [one for one in FORMATS if one[0] != "affine" or one[2] > 16]

SHAPES = ((5, 128, 1), (16, 256, 3), (35, 1152, 9), (33, 2176, 17))  # rows, size, tokens


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_products_are_those_of_numpy(
    native: ModuleType, instructions: str, bits: int, group_size: int
) -> None:
    for (num_rows, size, num_tokens), has_biases in product_of(SHAPES, (True, False)):
        w = weights(num_rows, size, bits, group_size, has_biases=has_biases)
        x = tokens(num_tokens, size)
        assert np.array_equal(product(native, x, w), expected_product(x, w)), (num_rows, size, has_biases)


@pytest.mark.parametrize(("mode", "bits", "group_size"), FLOAT_FORMATS)
def test_products_of_small_floats_are_those_of_numpy(
    native: ModuleType, instructions: str, mode: str, bits: int, group_size: int
) -> None:
    for num_rows, size, num_tokens in ((1, 32, 2), *SHAPES):
        w = weights(num_rows, size, bits, group_size, mode=mode)
        x = tokens(num_tokens, size)
        assert np.array_equal(product(native, x, w), expected_product(x, w)), (num_rows, size, num_tokens)


@pytest.mark.parametrize(("mode", "bits", "group_size"), FLOAT_FORMATS)
def test_every_code_and_scale_of_small_floats(
    native: ModuleType, instructions: str, mode: str, bits: int, group_size: int
) -> None:
    """Random codes and scales: all numbers of a format, except NaN and E8M0 scales that overflow."""
    rng = np.random.default_rng(7)
    codes = rng.integers(0, 256, (48, 512 * bits // 8), np.uint8)
    scales = rng.integers(60, 200, (48, 512 // group_size), np.uint8)
    if mode == "mxfp8":
        codes = np.where(codes & 127 == 127, 5, codes).astype(np.uint8)
    if mode == "nvfp4":
        scales = rng.integers(0, 127, scales.shape, np.uint8)
    w = Weights(mx.array(codes.view(np.uint32)), mx.array(scales), None, group_size, bits, mode)
    x = tokens(3, 512)
    assert np.array_equal(product(native, x, w), expected_product(x, w))
    rows = native.quantized_embedding(mx.arange(48), *w.arrays, *w.format)
    assert np.array_equal(np.array(rows), w.dense().astype(np.float32)), "rows are not rounded"
    theirs = mx.dequantize(w.weight, w.scales, None, group_size, bits, mode, dtype=mx.float32)
    assert mx.array_equal(rows, theirs), "MLX reads the same numbers"


def test_nan_in_the_weights_is_not_hidden(native: ModuleType, instructions: str) -> None:
    for mode, bits, group_size in FLOAT_FORMATS:
        w = weights(16, 64, bits, group_size, mode=mode)
        bad = np.array(w.scales)
        bad[3, 0] = 255 if mode != "nvfp4" else 127
        y = product(native, tokens(2, 64), replace(w, scales=mx.array(bad)))
        assert not np.isfinite(y[:, 3]).any(), mode
        assert np.isfinite(np.delete(y, 3, axis=1)).all(), mode
    w = weights(16, 64, 8, 32, mode="mxfp8")
    codes = np.array(w.weight).view(np.uint8)
    codes[5, 17] = 255
    y = product(native, tokens(2, 64), replace(w, weight=mx.array(codes.view(np.uint32))))
    assert np.isnan(y[:, 5]).all()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_scales_of_every_dtype(native: ModuleType, instructions: str, dtype: mx.Dtype) -> None:
    for group_size, has_biases in ((32, True), (16, True), (16, False)):
        w = weights(40, 320, 4, group_size, dtype, has_biases=has_biases)
        x = tokens(4, 320)
        assert np.array_equal(product(native, x, w), expected_product(x, w))


def test_small_and_special_scales_of_float16(native: ModuleType, instructions: str) -> None:
    w = weights(16, 64, 4, 32)
    w = replace(w, scales=mx.array(np.array([[6e-8, 1e-5], [65504, -2.5]] * 8, np.float16)))
    x = tokens(2, 64)
    assert np.array_equal(product(native, x, w), expected_product(x, w))


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize(("mode", "bits", "group_size"), FORMATS)
def test_a_token_does_not_depend_on_others_or_on_threads(
    native: ModuleType, instructions: str, mode: str, bits: int, group_size: int
) -> None:
    w = weights(120, 896, bits, group_size, mode=mode)  # enough for several threads, and for two tiles a row
    x = tokens(19, 896)
    whole = expected_product(x, w)
    for num_threads, num in product_of((1, 2, 5), (*range(1, 10), 19)):
        native.set_num_threads(num_threads)
        assert np.array_equal(product(native, x[-num:], w), whole[-num:]), (num_threads, num)


@pytest.mark.parametrize(
    ("mode", "bits", "group_size"), [("affine", 8, 32), ("affine", 6, 16), *FLOAT_FORMATS]
)
def test_products_are_close_to_float32(native: ModuleType, mode: str, bits: int, group_size: int) -> None:
    w = weights(64, 2048, bits, group_size, mx.float32, mode=mode)
    x = np.random.default_rng(2).standard_normal((8, 2048)).astype(np.float32)
    exact = x @ w.dense().T
    error = product(native, x, w) - exact
    # A step of the codes is about 2 / 127 / 128, the root mean square of rounding 1 / sqrt(12) of it.
    assert np.sqrt(np.mean((error / np.abs(exact).max(0)) ** 2)) < 5e-5


def test_zeros_infinities_and_nan(native: ModuleType, instructions: str) -> None:
    x = np.zeros((4, 64), np.float32)
    x[1, 5], x[2, 40], x[3, 7] = np.nan, np.inf, 1e-38
    for mode, bits, group_size in (("affine", 4, 32), ("affine", 6, 16), *FLOAT_FORMATS):
        found = product(native, x, weights(16, 64, bits, group_size, mode=mode))
        assert not found[0].any()
        assert np.isnan(found[1]).all()
        assert np.isnan(found[2]).all()
        assert not found[3].any()


@pytest.mark.parametrize(("mode", "bits", "group_size"), [("affine", 4, 32), *FLOAT_FORMATS])
def test_shapes_and_strides(native: ModuleType, mode: str, bits: int, group_size: int) -> None:
    w = weights(24, 96, bits, group_size, mode=mode)
    x = mx.array(tokens(30, 96)).reshape(5, 6, 96)

    def multiply(x: mx.array, w: Weights = w) -> mx.array:
        found: mx.array = native.quantized_matmul(x, *w.arrays, *w.format)
        return found

    whole = multiply(x)
    assert whole.shape == (5, 6, 24)
    assert mx.array_equal(multiply(x[:, ::2]), whole[:, ::2])
    assert mx.array_equal(multiply(x, w.each(lambda array: array[::2])), whole[..., ::2])
    assert mx.array_equal(mx.compile(lambda x: multiply(x) + 1)(x), whole + 1)
    assert multiply(mx.zeros((0, 96))).shape == (0, 24)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bits": 7}, "no weights of 7 bits"),
        ({"group_size": 48}, "not 48"),
        ({"group_size": 64}, "groups of 64 do not divide rows of 96"),
        ({"x": mx.zeros((2, 96), mx.float16)}, "tokens must be float32"),
        ({"scales": mx.zeros((24, 3), mx.int32)}, "float32, float16 or bfloat16"),
        ({"scales": mx.zeros((24, 3), mx.float32)}, "must have the same type"),
        ({"scales": mx.zeros((24, 4), mx.float16)}, "do not belong together"),
        ({"mode": "mxfp6"}, "no mode 'mxfp6'"),
        ({"mode": "mxfp4"}, "scales of mxfp4 must be uint8"),
        ({"mode": "mxfp4", "scales": mx.zeros((24, 3), mx.uint8)}, "mxfp4 has no biases"),
        ({"mode": "mxfp8", "scales": mx.zeros((24, 3), mx.uint8)}, "mxfp8 does not have 4 bits"),
        ({"mode": "nvfp4", "scales": mx.zeros((24, 6), mx.uint8)}, "nvfp4 does not have groups of 32"),
        ({"biases": mx.zeros((23, 3), mx.float16)}, "do not belong together"),
        ({"weight": mx.zeros((24, 11), mx.uint32)}, "do not belong together"),
    ],
)
def test_bad_weights_are_refused(native: ModuleType, change: dict[str, object], reason: str) -> None:
    w = weights(24, 96, 4, 32)
    given = {"x": mx.zeros((2, 96)), "weight": w.weight, "scales": w.scales, "biases": w.biases}
    given |= {"group_size": 32, "bits": 4, "mode": "affine"} | change  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=reason):
        native.quantized_matmul(*given.values())


def test_bad_experts_are_refused(native: ModuleType) -> None:
    w = weights(24, 96, 4, 32).each(lambda array: array[None])
    x = mx.zeros((2, 96))
    for expert in (-1, 1):
        with pytest.raises((ValueError, RuntimeError), match="no such expert"):
            mx.eval(native.gather_quantized_matmul(x, *w.arrays, mx.array([0, expert]), *w.format))


# -- layers ----------------------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self, bits: int, group_size: int = 32, mode: str = "affine") -> None:
        super().__init__()
        mx.random.seed(3)
        self.linear = nn.Linear(128, 48)
        self.embedding = nn.Embedding(50, 128)
        self.experts = SwitchLinear(128, 48, 5)
        self.experts.bias = mx.random.normal((5, 48))
        nn.quantize(self, group_size, bits, mode=mode)


@pytest.mark.parametrize(("mode", "bits", "group_size"), FORMATS_OF_MLX)
def test_layers_compute_what_mlx_computes(native: ModuleType, mode: str, bits: int, group_size: int) -> None:
    layers = Layers(bits, group_size, mode)
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


@pytest.mark.parametrize(("mode", "bits", "group_size"), FORMATS_OF_MLX)
def test_an_expert_does_not_depend_on_the_other_tokens(
    native: ModuleType, mode: str, bits: int, group_size: int
) -> None:
    layers = Layers(bits, group_size, mode)
    keep_quantized(layers)
    x = mx.array(tokens(40, 128))[:, None, None]
    chosen = mx.array(np.random.default_rng(5).integers(0, 5, (40, 2)))
    whole = layers.experts(x, chosen)
    for i in (0, 17, 39):
        assert mx.array_equal(layers.experts(x[i : i + 1], chosen[i : i + 1])[0], whole[i])


def test_experts_with_a_scale_of_their_own(native: ModuleType) -> None:
    """nvfp4 as published by NVIDIA: one more scale for each expert."""
    experts = SwitchLinear(128, 48, 5, bias=True)
    experts.bias = mx.random.normal((5, 48))
    experts.weight = experts.weight * mx.array([1e-3, 0.1, 1, 20, 1000])[:, None, None]
    model = nn.Module()
    model.experts = experts.to_quantized(16, 4, "nvfp4", global_scale=True)
    x, chosen = (
        mx.array(tokens(6, 128))[:, None, None],
        mx.array([[0, 4], [2, 2], [1, 0], [4, 3], [0, 0], [3, 1]]),
    )
    arrays = zip(model.experts.weight, model.experts.scales, model.experts.global_scale, strict=True)
    dense = [
        mx.dequantize(w, s, None, 16, 4, "nvfp4", global_scale=g, dtype=mx.float32) for w, s, g in arrays
    ]
    expected = x @ mx.stack(dense)[chosen].swapaxes(-1, -2) + experts.bias[chosen][..., None, :]
    assert keep_quantized(model) == []
    found = model.experts(x, chosen)  # MLX itself: on GPUs only
    assert (mx.abs(found - expected).max(-1) < 3e-4 * mx.abs(expected).max(-1)).all()


@pytest.mark.parametrize(
    ("mode", "bits", "group_size", "max_bits"),
    [
        ("affine", 6, 64, 8),
        ("affine", 8, 64, 4),
        ("mxfp4", 4, 32, 4),
        ("mxfp8", 8, 32, 4),
        ("nvfp4", 4, 16, 4),
    ],
)
def test_some_rows_of_a_layer(
    native: ModuleType, mode: str, bits: int, group_size: int, max_bits: int
) -> None:
    layers = Layers(bits, group_size, mode)
    keep_quantized(layers)
    rows, x = mx.array([7, 0, 49]), mx.array(tokens(4, 128))
    few, expected = linear_rows(layers.embedding, rows, max_bits)(x), layers.embedding.as_linear(x)[:, rows]
    if bits <= max_bits:
        assert mx.array_equal(few, expected)
    else:
        assert mx.linalg.norm(few - expected) < 0.2 * mx.linalg.norm(expected)


def test_a_layer_with_groups_of_16(native: ModuleType) -> None:
    w = weights(48, 256, 6, 16, has_biases=False)
    model = nn.Module()
    model.linear = new_linear({"weight": w.weight, "scales": w.scales}, *w.format)
    assert keep_quantized(model) == []
    x = tokens(5, 256)
    assert np.array_equal(np.array(model.linear(mx.array(x))), expected_product(x, w))


def test_formats_without_native_operations_are_named(native: ModuleType) -> None:
    layers = Layers(4)
    layers.linear.scales = layers.linear.scales.astype(mx.float32)
    layers.linear.biases = layers.linear.biases.astype(mx.float16)
    assert keep_quantized(layers) == ["linear"]
    assert type(layers.linear) is nn.QuantizedLinear
