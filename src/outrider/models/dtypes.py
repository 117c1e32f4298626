"""The dtype of loaded weights, and whether quantised layers stay quantised: for trunks and MTP heads."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path, tree_unflatten


def settle_dtype(network: nn.Module, dtype: str, trunk_dtype: mx.Dtype | None = None) -> None:
    """Cast the weights, and dequantise them where quantised layers are not to be kept.

    `dtype` is one of DTYPES. "auto": float32 on the CPU, elsewhere the dtype of the checkpoint.
    `trunk_dtype` is given for an MTP head, which is cast to it whatever `dtype` is.
    """
    if not keeps_quantized(dtype):
        dequantize(network)
    if trunk_dtype is not None:
        _cast(network, trunk_dtype)
    elif dtype != "auto":
        _cast(network, getattr(mx, dtype))
    elif _is_cpu():
        _cast(network, mx.float32)
    mx.eval(network.parameters())


def keeps_quantized(dtype: str) -> bool:
    """False on the CPU: MLX's quantised matrix products are slow there."""
    return not _is_cpu()


def dequantize(network: nn.Module) -> None:
    """Turn quantised layers into plain ones, in float32."""
    from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
    from mlx_lm.utils import dequantize_model

    if not any(hasattr(module, "bits") for _, module in network.named_modules()):
        return
    _cast(network, mx.float32)  # cast the scales first, so that dequantising does not round
    dequantize_model(network)  # leaves out the layers of latent attention
    plain = []
    for path, layer in network.named_modules():
        if isinstance(layer, QuantizedMultiLinear):
            arrays = layer.weight, layer.scales, layer.biases
            weight = mx.dequantize(*arrays, layer.group_size, layer.bits, layer.mode)
            plain.append((path, MultiLinear(weight.shape[2], weight.shape[1], weight.shape[0])))
            plain[-1][1].weight = weight
    network.update_modules(tree_unflatten(plain))


def _is_cpu() -> bool:
    return bool(mx.default_device() == mx.Device(mx.cpu))


def _cast(network: nn.Module, dtype: mx.Dtype) -> None:
    """Cast all floating-point weights, except those that the model definition wants in float32."""
    may_cast = getattr(network, "cast_predicate", None) or (lambda name: True)

    def cast(name: str, array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating):
            return array
        return array.astype(dtype if may_cast(name) else mx.float32)

    network.update(tree_map_with_path(cast, network.parameters()))
