"""Quantised layers that use the native extension on CPUs. Weights keep the codes that are stored.

MLX's own quantised matmuls on CPUs are slow, so without the extension these layers are dequantised. The
arithmetic is that of native/extension/quantized.h: tokens are rounded to 15 bits in blocks of 32. It is part
of the model: a layer computes the same to the bit in all passes, on one thread or several.

Where the CPU computes faster with it, the weights of models that are served are interleaved: of every 16 rows
the words lie side by side. Such arrays have one dimension more: code that expects plain ones fails.

    plain          [.., rows, words]            scales and biases [.., rows, groups]
    interleaved    [.., rows / 16, words, 16]                     [.., rows / 16, groups, 16]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mla import QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from outrider.cpu import extension
from outrider.cpu.huge_pages import use_huge_pages

BITS = (2, 3, 4, 5, 6, 8)  # of affine quantisation
GROUP_SIZES = (16, 32, 64, 128)  # of affine quantisation; MLX has no groups of 16
FLOAT_MODES = ("mxfp4", "mxfp8", "nvfp4")  # MLX has one number of bits and one group size for each
BLOCK = 32  # rows of weights are multiples
INTERLEAVED_BITS = (4, 8)
TILE_ROWS = 16  # rows that are interleaved
NVFP4_RANGE = 448 * 6  # the largest product of a scale and an element; a global scale stands for that


class CpuQuantizedLinear(nn.QuantizedLinear):
    def __call__(self, x: mx.array) -> mx.array:
        y = _product(self, x)
        return y + self["bias"] if "bias" in self else y

    def _extra_repr(self) -> str:
        num_outputs, num_inputs = kept_shape(self)
        weights = f"group_size={self.group_size}, bits={self.bits}, mode={self.mode}"
        return f"input_dims={num_inputs}, output_dims={num_outputs}, bias={'bias' in self}, {weights}"


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
        num_heads, num_outputs = self["weight"].shape[0], num_rows(self)
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


def interleave_weights(network: nn.Module) -> None:
    """Interleave the weights of all kept layers. They must not be changed afterwards."""
    for _, layer in quantized_layers(network):
        if is_kept(layer):
            interleave(layer)


def interleave(layer: nn.Module) -> None:
    """Interleave the weights of a kept layer, if the CPU computes faster with it."""
    if (
        is_interleaved(layer)
        or num_rows(layer) % TILE_ROWS
        or layer.bits not in INTERLEAVED_BITS
        or layer.mode == "mxfp8"
        or not extension.loaded().interleaves()
    ):
        return
    for name in _names(layer):
        layer[name] = mx.contiguous(mx.unflatten(layer[name], -2, (-1, TILE_ROWS)).swapaxes(-1, -2))
    mx.eval(layer.parameters())  # layer by layer, so that the weights of one are there twice at most


def whole_tiles(num_rows: int) -> int:
    """The most rows, up to these, that can be interleaved; all of them if they are fewer than a tile."""
    return num_rows if num_rows < TILE_ROWS else num_rows - num_rows % TILE_ROWS


def is_interleaved(layer: nn.Module) -> bool:
    has_experts = isinstance(layer, CpuQuantizedSwitchLinear | CpuQuantizedMultiLinear)
    return layer["weight"].ndim == (4 if has_experts else 3)


def plain_weights(layer: nn.Module) -> dict[str, mx.array]:
    """The weights of a kept layer as they are stored: `weight`, `scales`, and `biases` if there are some."""
    weights: dict[str, mx.array] = {name: layer[name] for name in _names(layer)}
    if is_interleaved(layer):
        weights = {name: one.swapaxes(-1, -2).flatten(-3, -2) for name, one in weights.items()}
    return weights


def _some_rows(layer: nn.Module, rows: mx.array) -> dict[str, mx.array]:
    """The same of these rows of a matrix, without a copy of the others."""
    if is_interleaved(layer):
        tiles, places = rows // TILE_ROWS, rows % TILE_ROWS
        return {name: layer[name][tiles, :, places] for name in _names(layer)}
    return {name: layer[name][rows] for name in _names(layer)}


def num_rows(layer: nn.Module) -> int:
    """The outputs of a kept layer, or of each of its experts."""
    shape = layer["weight"].shape
    return shape[-3] * shape[-1] if is_interleaved(layer) else shape[-2]


def kept_shape(layer: nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a kept layer, or of each of its experts."""
    num_groups = layer["scales"].shape[-2 if is_interleaved(layer) else -1]
    return num_rows(layer), num_groups * layer.group_size


def linear_rows(layer: nn.Module, rows: mx.array, max_bits: int = 8) -> CpuQuantizedLinear:
    """A layer with these rows of a kept layer's weights. Weights of more than `max_bits` get so many."""
    weights = _some_rows(layer, rows)
    group_size, bits, mode = _format(layer)
    if bits > max_bits:
        group_size, bits, mode = max(group_size, BLOCK), max_bits, "affine"
        parts: Any = mx.quantize(_rows(layer, rows), group_size, bits)
        weights = dict(zip(("weight", "scales", "biases"), parts, strict=True))
    found = new_linear(weights, group_size, bits, mode)
    interleave(found)
    use_huge_pages([found[name] for name in _names(found)])
    return found


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
    return _rows(layer, mx.arange(num_rows(layer)))


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
