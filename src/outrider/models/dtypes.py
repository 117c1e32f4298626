"""The dtype of loaded weights, and whether quantised layers stay quantised: for trunks and MTP heads."""

from __future__ import annotations

import logging

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path, tree_unflatten

from outrider import gpu_kernels
from outrider.cpu.extension import extension
from outrider.cpu.quantized import NVFP4_RANGE, is_kept, keep_quantized, plain_weights, quantized_layers
from outrider.models import machine
from outrider.rank_sums import division_of

log = logging.getLogger(__name__)

SMALL_GROUP_SIZE = 16  # of affine quantisation: models/groups_of_16.py
MLX_GROUP_SIZE = 32  # the smallest of affine quantisation in MLX
WORD_BITS = 32  # codes are packed into unsigned integers of this size


def settle_dtype(network: nn.Module, dtype: str, trunk_dtype: mx.Dtype | None = None) -> None:
    """Cast the weights, and dequantise layers that are not to stay quantised.

    `dtype` is one of DTYPES. "auto": on the CPU float32 with quantised weights as they are, elsewhere the
    dtype of the checkpoint. Any other dtype dequantises on the CPU. `trunk_dtype` is given for an MTP head,
    which is cast to it whatever `dtype` is.
    """
    if machine.is_cpu() and any(quantized_layers(network)):
        _settle_quantized(network, dtype)
    if trunk_dtype is not None:
        _cast(network, trunk_dtype)
    elif dtype != "auto":
        _cast(network, getattr(mx, dtype))
    elif machine.is_cpu():
        _cast(network, mx.float32)
    mx.eval(network.parameters())


def keeps_quantized(dtype: str) -> bool:
    """On a CPU only with the native extension: MLX's own quantised matmuls are slower than float32 ones."""
    return not machine.is_cpu() or (dtype == "auto" and extension() is not None)


def arithmetic(network: nn.Module) -> str:
    """Names how layers compute: with the same weights, another arithmetic gives other results."""
    if gpu_kernels.is_available():
        return "a GPU's"
    return "15-bit tokens" if any(is_kept(layer) for _, layer in quantized_layers(network)) else "mlx"


def _settle_quantized(network: nn.Module, dtype: str) -> None:
    if not keeps_quantized(dtype):
        dequantize(network)
    elif extension() is not None and (others := keep_quantized(network)):
        log.warning("%d layers become float32: their quantisation has no operations for CPUs", len(others))
        layers = dict(network.named_modules())
        for name in others:
            holder = nn.Module()
            holder.layer = layers[name]
            dequantize(holder)
            network.update_modules(tree_unflatten([(name, holder.layer)]))


def dequantize(network: nn.Module) -> None:
    """Turn quantised layers into plain ones, in float32."""
    from mlx_lm.utils import dequantize_model

    if not any(quantized_layers(network)):
        return
    for _, layer in quantized_layers(network):
        if is_kept(layer):
            layer.update(plain_weights(layer))
    divisions = {path: division_of(layer) for path, layer in quantized_layers(network)}
    _cast(network, mx.float32)  # cast the scales first, so that dequantising does not round
    plain = [(path, _plain(layer)) for path, layer in quantized_layers(network)]
    network.update_modules(tree_unflatten([(path, layer) for path, layer in plain if layer is not None]))
    dequantize_model(network)
    for path, layer in network.named_modules():
        if (division := divisions.get(path)) is not None:
            layer.division = division


def _plain(layer: nn.Module) -> nn.Module | None:
    """The plain form of a layer that mlx-lm's `dequantize_model` leaves out or reads wrongly, else None."""
    from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
    from mlx_lm.models.switch_layers import SwitchLinear

    global_scale = layer.get("global_scale")  # of experts in nvfp4
    if isinstance(layer, QuantizedMultiLinear):
        plain: nn.Module = MultiLinear(1, 1, 1)
    elif global_scale is not None:
        plain = SwitchLinear(1, 1, 1, bias=False)
    elif isinstance(layer, nn.QQLinear):
        plain = nn.Linear(1, 1, bias=False)
    elif layer.mode == "affine" and layer.group_size == SMALL_GROUP_SIZE:
        plain = (
            nn.Embedding(1, 1) if isinstance(layer, nn.QuantizedEmbedding) else nn.Linear(1, 1, bias=False)
        )
    else:
        return None
    weights = layer["weight"], layer["scales"], layer.get("biases")
    plain.weight = dense_weight(*weights, layer.group_size, layer.bits, layer.mode)
    if global_scale is not None:
        plain.weight = plain.weight * (global_scale.astype(mx.float32) / NVFP4_RANGE)[:, None, None]
    if "bias" in layer:
        plain.bias = layer.bias
    return plain


def dense_weight(
    codes: mx.array, scales: mx.array, biases: mx.array | None, group_size: int, bits: int, mode: str
) -> mx.array:
    """Quantised weights in float32, also with groups of 16 and without biases, which MLX does not have."""
    if mode != "affine":
        return mx.dequantize(codes, scales, None, group_size, bits, mode, dtype=mx.float32)
    ones = mx.ones((*codes.shape[:-1], codes.shape[-1] * WORD_BITS // bits // MLX_GROUP_SIZE))
    numbers = mx.dequantize(codes, ones, mx.zeros(ones.shape), MLX_GROUP_SIZE, bits)
    groups = mx.unflatten(numbers, -1, (-1, group_size))
    if biases is None:
        dense = (groups - 2 ** (bits - 1)) * scales[..., None].astype(mx.float32)
    else:
        dense = groups * scales[..., None].astype(mx.float32) + biases[..., None].astype(mx.float32)
    return mx.flatten(dense, -2)


def _cast(network: nn.Module, dtype: mx.Dtype) -> None:
    """Cast all floating-point weights, except those that the model definition wants in float32.

    Scales and biases of layers that stay quantised on a CPU remain as they are stored.
    """
    may_cast = getattr(network, "cast_predicate", None) or (lambda name: True)
    kept = {
        f"{name}.{part}"
        for name, layer in quantized_layers(network)
        if is_kept(layer)
        for part in ("scales", "biases")
    }

    def cast(name: str, array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating) or name in kept:
            return array
        return array.astype(dtype if may_cast(name) else mx.float32)

    network.update(tree_map_with_path(cast, network.parameters()))
