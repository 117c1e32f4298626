"""Interleaved weights give the results of plain ones, to the bit."""

from __future__ import annotations

from itertools import product as product_of
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear

from cpu.quantized_products import Weights, expected_product, product, tokens, weights
from outrider.cpu.quantized import (
    TILE_ROWS,
    dequantized,
    interleave_weights,
    is_interleaved,
    keep_quantized,
    kept_shape,
    linear_rows,
    num_rows,
    plain_weights,
)

AFFINE = [("affine", bits, group_size) for bits in (4, 8) for group_size in (16, 32, 64, 128)]
FORMATS = [*AFFINE, ("mxfp4", 4, 32), ("nvfp4", 4, 16)]  # mode, bits, group size


@pytest.fixture
def interleaves(native: ModuleType) -> None:
    if not native.interleaves():
        pytest.skip("this CPU is as fast with plain weights")


def interleaved(array: mx.array) -> mx.array:
    return mx.contiguous(mx.unflatten(array, -2, (-1, TILE_ROWS)).swapaxes(-1, -2))


@pytest.mark.parametrize(("mode", "bits", "group_size"), FORMATS)
def test_products_are_those_of_numpy(
    native: ModuleType, instructions: str, mode: str, bits: int, group_size: int
) -> None:
    size = 384 if group_size > 32 else 352  # even and odd numbers of blocks
    for num_tokens, has_biases in product_of((*range(1, 10), 16, 19), (True, False)):
        w = weights(48, size, bits, group_size, mode=mode, has_biases=has_biases)
        x = tokens(num_tokens, size)
        assert np.array_equal(product(native, x, w.each(interleaved)), expected_product(x, w)), num_tokens


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_scales_of_every_dtype(native: ModuleType, instructions: str, dtype: mx.Dtype) -> None:
    for group_size, has_biases in product_of((16, 64), (True, False)):
        w = weights(32, 320, 4, group_size, dtype, has_biases=has_biases)
        x = tokens(4, 320)
        assert np.array_equal(product(native, x, w.each(interleaved)), expected_product(x, w))


@pytest.mark.parametrize(("mode", "bits", "group_size"), FORMATS)
def test_rows_and_experts(
    native: ModuleType, instructions: str, mode: str, bits: int, group_size: int
) -> None:
    w = weights(96, 256, bits, group_size, mode=mode)
    rows = mx.array([3, 95, 16, 0])
    plain, found = (
        native.quantized_embedding(rows, *each.arrays, *each.format) for each in (w, w.each(interleaved))
    )
    assert mx.array_equal(plain, found)
    experts = w.each(lambda array: mx.unflatten(array, 0, (3, 32)))
    x, chosen = mx.array(tokens(11, 256)), mx.array([2, 0, 1, 2, 2, 0, 1, 1, 0, 2, 2])
    plain, found = (
        native.gather_quantized_matmul(x, *each.arrays, chosen, *each.format)
        for each in (experts, experts.each(interleaved))
    )
    assert mx.array_equal(plain, found)


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize(("mode", "bits", "group_size"), FORMATS)
def test_a_token_does_not_depend_on_others_or_on_threads(
    native: ModuleType, instructions: str, mode: str, bits: int, group_size: int
) -> None:
    # 17 tiles: one thread computes two of them together and one alone, five threads compute each one alone.
    w = weights(272, 384 if group_size > 32 else 416, bits, group_size, mode=mode)
    x = tokens(35, w.scales.shape[-1] * group_size)
    whole, w = expected_product(x, w), w.each(interleaved)
    for num_threads, num in product_of((1, 2, 5), (*range(1, 10), 16, 17, 35)):  # 16 are computed together
        native.set_num_threads(num_threads)
        assert np.array_equal(product(native, x[-num:], w), whole[-num:]), (num_threads, num)


@pytest.mark.parametrize(
    ("w", "reason"),
    [
        (weights(32, 96, 5, 32).each(interleaved), "affine of 5 bits cannot be interleaved"),
        (weights(32, 96, 8, 32, mode="mxfp8").each(interleaved), "mxfp8 of 8 bits cannot be interleaved"),
        (weights(32, 96, 4, 32).each(lambda one: mx.unflatten(one, 0, (4, 8))), "tiles of 12 rows, not 16"),
    ],
)
def test_other_weights_are_refused(native: ModuleType, w: Weights, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        native.quantized_matmul(mx.zeros((2, 96)), *w.arrays, *w.format)


class Layers(nn.Module):
    def __init__(self, bits: int, num_rows: int = 48) -> None:
        super().__init__()
        mx.random.seed(3)
        self.linear = nn.Linear(128, num_rows)
        self.embedding = nn.Embedding(num_rows, 128)
        self.experts = SwitchLinear(128, num_rows, 5, bias=False)
        self.heads = MultiLinear(128, num_rows, 3)
        nn.quantize(self, 32, bits)


NAMES = ("linear", "embedding", "experts", "heads")


@pytest.mark.parametrize("bits", [4, 8])
def test_layers_that_are_served_are_interleaved(interleaves: None, bits: int) -> None:
    layers, before = Layers(bits), Layers(bits)
    assert keep_quantized(layers) == []
    assert not any(is_interleaved(layers[name]) for name in NAMES), "not before the model is served"
    interleave_weights(layers)
    assert "input_dims=128, output_dims=48" in repr(layers.linear)
    for name in NAMES:
        layer = layers[name]
        assert is_interleaved(layer), name
        assert kept_shape(layer) == (48, 128)
        for part, array in plain_weights(layer).items():
            assert mx.array_equal(array, before[name][part]), (name, part)
    dense = mx.dequantize(*(before.linear[part] for part in ("weight", "scales", "biases")), 32, bits)
    assert mx.allclose(dequantized(layers.linear), dense, atol=1e-6)
    rows = mx.array([*range(40, 48), *range(8)])
    some = linear_rows(layers.embedding, rows)
    assert is_interleaved(some)
    x = mx.array(tokens(3, 128))
    assert mx.array_equal(some(x), layers.embedding.as_linear(x)[:, rows])
    interleave_weights(layers)
    assert is_interleaved(layers.linear), "once more changes nothing"
    assert num_rows(layers.linear) == 48


def test_other_layers_stay_plain(native: ModuleType) -> None:
    for layers in (Layers(5), Layers(4, num_rows=40)):
        keep_quantized(layers)
        interleave_weights(layers)
        assert not any(is_interleaved(layers[name]) for name in NAMES)
    layers = Layers(4)
    assert native.use_instructions("portable")
    try:
        keep_quantized(layers)
        interleave_weights(layers)
    finally:
        assert native.use_instructions("")
    assert not any(is_interleaved(layers[name]) for name in NAMES)
