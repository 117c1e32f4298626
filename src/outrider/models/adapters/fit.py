"""An adapter's arrays as the terms of one model's layers.

mlx-lm's layers compute, with the scale s:

    LoRA   y + s (x A) B                               A [inputs, rank], B [rank, outputs]
    DoRA   (y0 + s (x A) B) g + bias                   y0 = y without its bias, g = m / |w + s (A B)^T|

Both have the form  g y + (x A) (s g B) + (1 - g) bias.  The norm |..| is that of each row of the weights and
does not depend on x: it is computed here, once.

On several ranks a layer has its own outputs, and takes these of B and m. Or it has its own inputs, and takes
these of A: then the outputs are summed over the ranks afterwards, and the norms here, by all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from outrider.cpu.quantized import dequantized, is_kept, kept_shape
from outrider.models.adapters.files import AdapterError, AdapterFiles
from outrider.rank_sums import SummedLinear, division_of, sum_over_ranks

LANGUAGE_MODEL = "language_model."  # before the names in adapters of vision models
LINEAR = (nn.Linear, nn.QuantizedLinear)
EMBEDDING = (nn.Embedding, nn.QuantizedEmbedding)
SWITCH = (SwitchLinear, QuantizedSwitchLinear)
OTHERWISE_DIVIDED = "Several ranks divide this layer in a way that adapters are not divided in: use one rank."
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(code) for name, code in (("F32", "<f4"), ("F16", "<f2"), ("BF16", "<u2"))
}


@dataclass(frozen=True)
class LayerTerms:
    """What an adapter does to one linear layer: y = gain * y + (x @ a.T) @ b + shift. Float32."""

    a: mx.array  # [rank, inputs]
    b: mx.array  # [rank, outputs]; scale and gain are in it
    gain: mx.array | None = None  # [outputs]; None: 1
    shift: mx.array | None = None  # [outputs]; None: 0

    @property
    def arrays(self) -> list[mx.array]:
        return [array for array in (self.a, self.b, self.gain, self.shift) if array is not None]


@dataclass(frozen=True)
class AdaptedLayer:
    """A layer of the model, and the adapter's arrays for it, in float32."""

    path: str  # in the model
    module: nn.Module
    lora_a: mx.array
    lora_b: mx.array
    m: mx.array | None

    @property
    def kind(self) -> str:
        return type(self.module).__name__


def adapted_layers(files: AdapterFiles, model: nn.Module) -> list[AdaptedLayer]:
    """Find the adapter's layers in the model. Raises AdapterError for a layer that does not exist."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    arrays = _read_arrays(files)
    found = []
    for name in files.layers:
        path = name if name in modules else name.removeprefix(LANGUAGE_MODEL)
        if path not in modules:
            raise AdapterError(
                f"{files.path}: the adapter changes {name}, and this model has no such layer. The adapter is "
                "for another base model."
            )
        if isinstance(modules[path], SummedLinear):
            path = f"{path}.linear"
        m = arrays.get(f"{name}.m")
        found.append(AdaptedLayer(path, modules[path], arrays[f"{name}.lora_a"], arrays[f"{name}.lora_b"], m))
    return found


def _read_arrays(files: AdapterFiles) -> dict[str, mx.array]:
    """`read_adapter` has checked the header.

    `mx.load` would read the bytes when they are needed, on a thread that waits for Python's lock. This can be
    held by `mx.clear_cache`, which waits for that thread: a model that is unloaded would stop the server.
    """
    start = 8 + int.from_bytes(files.tensors[:8], "little")
    header = json.loads(files.tensors[8:start])
    arrays = {name: _array(files.tensors, start, header[name]) for name in files.shapes}
    for name, array in arrays.items():
        if not mx.isfinite(array).all().item():
            raise AdapterError(f"{files.path}: {name} holds NaN or infinity.")
    return arrays


def _array(data: bytes, start: int, facts: Mapping[str, Any]) -> mx.array:
    """A tensor of a safetensors file, in float32."""
    begin, end = facts["data_offsets"]
    dtype = NUMPY_DTYPES[facts["dtype"]]
    numbers = mx.array(np.frombuffer(data, dtype, (end - begin) // dtype.itemsize, start + begin))
    if facts["dtype"] == "BF16":  # numpy has no bfloat16
        numbers = numbers.view(mx.bfloat16)
    return numbers.reshape(facts["shape"]).astype(mx.float32)


def linear_terms(files: AdapterFiles, layer: AdaptedLayer) -> LayerTerms:
    """The terms of a linear layer, quantised or not. Raises AdapterError."""
    num_outputs, num_inputs = _whole_shape(files, layer)
    wanted = {"lora_a": (num_inputs, files.rank), "lora_b": (files.rank, num_outputs), "m": (num_outputs,)}
    check_shapes(files, layer, wanted)
    layer = _of_this_rank(layer)
    a, b = layer.lora_a.T, files.scale * layer.lora_b
    gain = shift = None
    if layer.m is not None:
        gain = layer.m / _row_norms(layer, linear_weights(layer.module) + (layer.lora_a @ b).T)
        if not mx.isfinite(gain).all().item():
            raise AdapterError(f"{files.path}: with this adapter a row of {layer.path} would be 0.")
        b = b * gain
        if "bias" in layer.module:
            shift = (1 - gain) * layer.module["bias"].astype(mx.float32)
    terms = LayerTerms(mx.contiguous(a), mx.contiguous(b), gain, shift)
    mx.eval(terms.arrays)
    return terms


def _whole_shape(files: AdapterFiles, layer: AdaptedLayer) -> tuple[int, int]:
    """Outputs and inputs of the layer on all ranks together."""
    num_outputs, num_inputs = linear_shape(layer.module)
    division = division_of(layer.module)
    if division is None:
        return num_outputs, num_inputs
    if division.axis is None:
        raise refusal(files, layer, OTHERWISE_DIVIDED)
    size = division.group.size()
    return (num_outputs * size, num_inputs) if division.axis == 0 else (num_outputs, num_inputs * size)


def _of_this_rank(layer: AdaptedLayer) -> AdaptedLayer:
    division = division_of(layer.module)
    if division is None:
        return layer
    if division.axis == 1:
        return replace(layer, lora_a=division.own(layer.lora_a, 0))
    m = None if layer.m is None else division.own(layer.m, 0)
    return replace(layer, lora_b=division.own(layer.lora_b, 1), m=m)


def _row_norms(layer: AdaptedLayer, weights: mx.array) -> mx.array:
    """weights [outputs, inputs] -> [outputs]"""
    division = division_of(layer.module)
    if division is None or division.axis == 0:
        return mx.linalg.norm(weights, axis=1)
    return mx.sqrt(sum_over_ranks(mx.sum(mx.square(weights), axis=1), division.group))


def linear_shape(module: nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a linear layer."""
    if is_kept(module):
        return kept_shape(module)
    if isinstance(module, nn.QuantizedLinear):
        num_outputs, num_groups = module["scales"].shape
        return num_outputs, num_groups * module.group_size
    num_outputs, num_inputs = module["weight"].shape
    return num_outputs, num_inputs


def linear_weights(module: nn.Module) -> mx.array:
    """In float32.  [outputs, inputs]"""
    if is_kept(module):
        return dequantized(module)
    if not isinstance(module, nn.QuantizedLinear):
        return module["weight"].astype(mx.float32)
    return mx.dequantize(
        module["weight"], module["scales"], module.get("biases"), module.group_size, module.bits, module.mode
    ).astype(mx.float32)


def check_shapes(files: AdapterFiles, layer: AdaptedLayer, wanted: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in wanted.items():
        array: mx.array | None = getattr(layer, name)
        if array is not None and array.shape != shape:
            raise AdapterError(
                f"{files.path}: {layer.path}.{name} has the shape {array.shape}, and this model needs "
                f"{shape}. The adapter is for another base model."
            )


def refusal(files: AdapterFiles, layer: AdaptedLayer, reason: str) -> AdapterError:
    return AdapterError(f"{files.path}: the adapter changes {layer.path} ({layer.kind}). {reason}")
