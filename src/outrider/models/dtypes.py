"""The dtype of loaded weights, and whether quantised layers stay quantised: for trunks and MTP heads."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from outrider.cpu.extension import extension
from outrider.cpu.quantized import is_kept, keep_quantized, quantized_layers

log = logging.getLogger(__name__)


def settle_dtype(network: nn.Module, dtype: str, trunk_dtype: mx.Dtype | None = None) -> None:
    """Cast the weights, and decide on a CPU which quantised layers stay quantised.

    `dtype` is one of DTYPES. "auto": on the CPU float32 with quantised weights as they are, elsewhere the
    dtype of the checkpoint. Any other dtype dequantises on the CPU. `trunk_dtype` is given for an MTP head,
    which is cast to it whatever `dtype` is.
    """
    is_cpu = mx.default_device() == mx.Device(mx.cpu)
    if is_cpu:
        _settle_quantized(network, may_keep=dtype == "auto")
    if trunk_dtype is not None:
        _cast(network, trunk_dtype)
    elif dtype != "auto":
        _cast(network, getattr(mx, dtype))
    elif is_cpu:
        _cast(network, mx.float32)
    mx.eval(network.parameters())


def arithmetic(network: nn.Module) -> str:
    """Names how quantised layers compute: with the same weights, another arithmetic gives other results."""
    return "int8 tokens" if any(is_kept(layer) for _, layer in quantized_layers(network)) else "mlx"


def _settle_quantized(network: nn.Module, may_keep: bool) -> None:
    """Keep the layers that the native extension computes; dequantise the others to float32.

    MLX's own quantised matmuls on CPUs are slower than float32 ones.
    """
    names = [name for name, layer in quantized_layers(network) if _can_dequantize(layer)]
    if names and may_keep and extension() is not None:
        others = keep_quantized(network)
        names = [name for name in names if name in others]
        if names:
            log.warning("%d layers become float32: their quantisation has no operations for CPUs", len(names))
    _dequantize(network, names)


def _can_dequantize(layer: nn.Module) -> bool:
    """False for layers that only MLX's own operations compute on a CPU."""
    kinds = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear)
    return isinstance(layer, kinds) and getattr(layer, "global_scale", None) is None


def _dequantize(network: nn.Module, names: Sequence[str]) -> None:
    from mlx_lm.utils import dequantize_model

    layers = dict(network.named_modules())
    for name in names:
        holder = nn.Module()
        holder.layer = layers[name]
        _cast(holder, mx.float32)  # the scales first, so that dequantising does not round
        dequantize_model(holder)
        network.update_modules(tree_unflatten([(name, holder.layer)]))


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
