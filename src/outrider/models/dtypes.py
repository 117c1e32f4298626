"""The dtype of loaded weights, and whether quantised layers stay quantised: for trunks and MTP heads."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path


def settle_dtype(network: nn.Module, dtype: str, trunk_dtype: mx.Dtype | None = None) -> None:
    """Cast the weights. On the CPU also dequantise: MLX's quantised matrix products are slow there.

    `dtype` is one of DTYPES. "auto": float32 on the CPU, elsewhere the dtype of the checkpoint.
    `trunk_dtype` is given for an MTP head, which is cast to it whatever `dtype` is.
    """
    is_cpu = mx.default_device() == mx.Device(mx.cpu)
    if is_cpu:
        _dequantize(network)
    if trunk_dtype is not None:
        _cast(network, trunk_dtype)
    elif dtype != "auto":
        _cast(network, getattr(mx, dtype))
    elif is_cpu:
        _cast(network, mx.float32)
    mx.eval(network.parameters())


def _dequantize(network: nn.Module) -> None:
    """Turn quantised layers into plain ones, in float32."""
    from mlx_lm.utils import dequantize_model

    if any(hasattr(module, "bits") for _, module in network.named_modules()):
        _cast(network, mx.float32)  # cast the scales first, so that dequantising does not round
        dequantize_model(network)


def _cast(network: nn.Module, dtype: mx.Dtype) -> None:
    """Cast all floating-point weights, except those that the model definition wants in float32."""
    may_cast = getattr(network, "cast_predicate", None) or (lambda name: True)

    def cast(name: str, array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating):
            return array
        return array.astype(dtype if may_cast(name) else mx.float32)

    network.update(tree_map_with_path(cast, network.parameters()))
