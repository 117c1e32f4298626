"""Quantised layers that use the native extension on CPUs. Weights stay in memory as they are stored.

MLX's own quantised matmuls on CPUs are slow, so without the extension these layers are dequantised. The
arithmetic is that of native/extension/quantized.h: tokens are rounded to 15 bits in blocks of 32. It is part
of the model: a layer computes the same to the bit in all passes, on one thread or several.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mla import QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from outrider.cpu import extension

BITS = (2, 3, 4, 5, 6, 8)  # of affine quantisation
GROUP_SIZES = (16, 32, 64, 128)  # of affine quantisation; MLX has no groups of 16
FLOAT_MODES = ("mxfp4", "mxfp8", "nvfp4")  # MLX has one number of bits and one group size for each
BLOCK = 32  # rows of weights are multiples
NVFP4_RANGE = 448 * 6  # the largest product of a scale and an element; a global scale stands for that


class CpuQuantizedLinear(nn.QuantizedLinear):
    def __call__(self, x: mx.array) -> mx.array:
        y = _product(self, x)
        return y + self["bias"] if "bias" in self else y


class CpuQuantizedEmbedding(nn.QuantizedEmbedding):
    def __call__(self, token_ids: mx.array) -> mx.array:
        return _rows(self, token_ids)

    def as_linear(self, x: mx.array) -> mx.array:
        return _product(self, x)


class CpuQuantizedSwitchLinear(QuantizedSwitchLinear):
    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """x [..., 1, size], whose leading dimensions broadcast to those of `indices` -> [..., 1, rows]"""
        size = x.shape[-1]
        tokens = mx.broadcast_to(x, (*indices.shape, 1, size)).reshape(-1, size)
        experts = indices.reshape(-1).astype(mx.int32)  # sorted or not: the operation sorts them itself
        multiply = extension.loaded().gather_quantized_matmul
        y = multiply(tokens.astype(mx.float32), *_weights(self), experts, *_format(self))
        y = y.reshape(*indices.shape, 1, -1)
        if self.get("global_scale") is not None:
            y = y * (self["global_scale"] / NVFP4_RANGE)[indices][..., None, None]
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y


class CpuQuantizedMultiLinear(QuantizedMultiLinear):
    """A linear layer for each head, of latent attention."""

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        """x [rows, heads, width, size], or one head for all -> [rows, heads, width, outputs]"""
        num_heads, num_outputs, _ = self["weight"].shape
        if not transpose:
            flat = (None if array is None else array.flatten(0, 1) for array in _weights(self))
            embed = extension.loaded().quantized_embedding
            rows = embed(mx.arange(num_heads * num_outputs), *flat, *_format(self))
            return x @ rows.reshape(num_heads, num_outputs, -1)
        rows, _, width, size = x.shape
        tokens = mx.broadcast_to(x, (rows, num_heads, width, size)).reshape(-1, size).astype(mx.float32)
        heads = mx.broadcast_to(mx.arange(num_heads)[:, None], (rows, num_heads, width)).reshape(-1)
        multiply = extension.loaded().gather_quantized_matmul
        y = multiply(tokens, *_weights(self), heads.astype(mx.int32), *_format(self))
        return y.reshape(rows, num_heads, width, num_outputs)


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.QuantizedLinear: CpuQuantizedLinear,
    nn.QQLinear: CpuQuantizedLinear,  # it rounds tokens too, to 4 or 8 bits; MLX computes that on GPUs only
    nn.QuantizedEmbedding: CpuQuantizedEmbedding,
    QuantizedSwitchLinear: CpuQuantizedSwitchLinear,
    QuantizedMultiLinear: CpuQuantizedMultiLinear,
}


def keep_quantized(network: nn.Module) -> list[str]:
    """Give the quantised layers of a model these classes. Returns the names of those that cannot."""
    others = []
    for name, layer in quantized_layers(network):
        if type(layer) in _CLASSES and _is_supported(layer):
            layer.__class__ = _CLASSES[type(layer)]
        elif not is_kept(layer):
            others.append(name)
    return others


def linear_rows(layer: nn.Module, rows: mx.array, max_bits: int = 8) -> CpuQuantizedLinear:
    """A layer with these rows of a kept layer's weights. Weights of more than `max_bits` get so many."""
    weights: dict[str, mx.array] = {name: layer[name][rows] for name in _names(layer)}
    group_size, bits, mode = _format(layer)
    if bits > max_bits:
        group_size, bits, mode = max(group_size, BLOCK), max_bits, "affine"
        parts: Any = mx.quantize(_rows(layer, rows), group_size, bits)
        weights = dict(zip(("weight", "scales", "biases"), parts, strict=True))
    return new_linear(weights, group_size, bits, mode)


def new_linear(weights: dict[str, mx.array], group_size: int, bits: int, mode: str) -> CpuQuantizedLinear:
    """A layer with these weights: `weight`, `scales`, and `biases` and `bias` if there are some."""
    found = CpuQuantizedLinear(BLOCK, 1, bias=False, group_size=BLOCK, bits=bits)
    _settle(found, weights, group_size, bits, mode)
    return found


def new_embedding(
    weights: dict[str, mx.array], group_size: int, bits: int, mode: str
) -> CpuQuantizedEmbedding:
    found = CpuQuantizedEmbedding(1, BLOCK, group_size=BLOCK, bits=bits)
    num_embeddings, num_groups = weights["scales"].shape
    found.num_embeddings, found.dims = num_embeddings, num_groups * group_size
    _settle(found, weights, group_size, bits, mode)
    return found


def _settle(layer: nn.Module, weights: dict[str, mx.array], group_size: int, bits: int, mode: str) -> None:
    layer.group_size, layer.bits, layer.mode = group_size, bits, mode
    layer.biases = None
    for name, array in weights.items():
        setattr(layer, name, array)


def dequantized(layer: nn.Module) -> mx.array:
    """The weights of a kept layer in float32.  [outputs, inputs]"""
    return _rows(layer, mx.arange(layer["weight"].shape[0]))


def quantized_layers(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, layer) for name, layer in network.named_modules() if hasattr(layer, "bits"))


def is_kept(layer: nn.Module) -> bool:
    return isinstance(layer, tuple(_CLASSES.values()))


def _is_supported(layer: nn.Module) -> bool:
    scales, biases = layer["scales"], layer.get("biases")
    if scales.shape[-1] * layer.group_size % BLOCK:
        return False
    if layer.mode in FLOAT_MODES:
        return biases is None and scales.dtype == mx.uint8
    return (
        layer.mode == "affine"
        and layer.bits in BITS
        and layer.group_size in GROUP_SIZES
        and mx.issubdtype(scales.dtype, mx.floating)
        and (biases is None or scales.dtype == biases.dtype)
    )


def _names(layer: nn.Module) -> list[str]:
    return ["weight", "scales"] if layer.get("biases") is None else ["weight", "scales", "biases"]


def _weights(layer: nn.Module) -> tuple[mx.array, mx.array, mx.array | None]:
    return layer["weight"], layer["scales"], layer.get("biases")


def _format(layer: nn.Module) -> tuple[int, int, str]:
    return layer.group_size, layer.bits, layer.mode


def _product(layer: nn.Module, x: mx.array) -> mx.array:
    multiply = extension.loaded().quantized_matmul
    return multiply(x.astype(mx.float32), *_weights(layer), *_format(layer))


def _rows(layer: nn.Module, rows: mx.array) -> mx.array:
    """These rows of the weights in float32.  [..., size]"""
    embed = extension.loaded().quantized_embedding
    return embed(rows.astype(mx.int32), *_weights(layer), *_format(layer))
