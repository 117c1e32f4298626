"""Quantised layers that use the native extension on CPUs. Weights stay in memory as they are stored.

MLX's own quantised matmuls on CPUs are slow, so without the extension these layers are dequantised. The
arithmetic is that of native/extension/quantized.h: tokens are rounded to 15 bits in blocks of 32. It is part
of the model: a layer computes the same to the bit in all passes, on one thread or several.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from outrider.cpu import extension

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)


class CpuQuantizedLinear(nn.QuantizedLinear):
    def __call__(self, x: mx.array) -> mx.array:
        y = _product(self, x)
        return y + self["bias"] if "bias" in self else y


class CpuQuantizedEmbedding(nn.QuantizedEmbedding):
    def __call__(self, token_ids: mx.array) -> mx.array:
        weights = self["weight"], self["scales"], self["biases"]
        embed = extension.loaded().quantized_embedding
        return embed(token_ids.astype(mx.int32), *weights, self.group_size, self.bits)

    def as_linear(self, x: mx.array) -> mx.array:
        return _product(self, x)


class CpuQuantizedSwitchLinear(QuantizedSwitchLinear):
    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """x [..., 1, size], whose leading dimensions broadcast to those of `indices` -> [..., 1, rows]"""
        size = x.shape[-1]
        tokens = mx.broadcast_to(x, (*indices.shape, 1, size)).reshape(-1, size)
        weights = self["weight"], self["scales"], self["biases"]
        experts = indices.reshape(-1).astype(mx.int32)  # sorted or not: the operation sorts them itself
        multiply = extension.loaded().gather_quantized_matmul
        y = multiply(tokens.astype(mx.float32), *weights, experts, self.group_size, self.bits)
        y = y.reshape(*indices.shape, 1, -1)
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.QuantizedLinear: CpuQuantizedLinear,
    nn.QuantizedEmbedding: CpuQuantizedEmbedding,
    QuantizedSwitchLinear: CpuQuantizedSwitchLinear,
}


def keep_quantized(network: nn.Module) -> list[str]:
    """Give the quantised layers of a model these classes. Returns the names of those that cannot."""
    others = []
    for name, layer in quantized_layers(network):
        if type(layer) in _CLASSES and _is_supported(layer):
            layer.__class__ = _CLASSES[type(layer)]
        elif type(layer) not in _CLASSES.values():
            others.append(name)
    return others


def linear_rows(layer: nn.Module, rows: mx.array, max_bits: int = 8) -> CpuQuantizedLinear:
    """A layer with these rows of a kept layer's weights. Weights of more than `max_bits` get so many."""
    group_size, bits = layer.group_size, layer.bits
    weight, scales, biases = (layer[name][rows] for name in ("weight", "scales", "biases"))
    if bits > max_bits:
        numbers = mx.dequantize(weight, scales, biases, group_size, bits)
        weight, scales, biases = mx.quantize(numbers, group_size, max_bits)
        bits = max_bits
    found = CpuQuantizedLinear(group_size, 1, bias=False, group_size=group_size, bits=bits)
    found.update({"weight": weight, "scales": scales, "biases": biases})
    return found


def quantized_layers(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, layer) for name, layer in network.named_modules() if hasattr(layer, "bits"))


def is_kept(layer: nn.Module) -> bool:
    return type(layer) in _CLASSES.values()


def _is_supported(layer: nn.Module) -> bool:
    return (
        layer.mode == "affine"
        and layer.get("biases") is not None
        and layer.bits in BITS
        and layer.group_size in GROUP_SIZES
        and layer.scales.dtype == layer.biases.dtype
    )


def _product(layer: nn.Module, x: mx.array) -> mx.array:
    weights = layer["weight"], layer["scales"], layer["biases"]
    multiply = extension.loaded().quantized_matmul
    return multiply(x.astype(mx.float32), *weights, layer.group_size, layer.bits)
