"""Checks the quantised tensors of a checkpoint and its `quantization` config before mlx-lm uses them.

mlx-lm derives bits and group size from the shapes of the tensors and passes them to MLX, which divides by
them: a damaged tensor could end the process. An error names the tensor, or the entry of config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

BITS = (1, 2, 3, 4, 5, 6, 8)
GROUP_SIZES = (16, 32, 64, 128)
MODES = {  # with their bits and group sizes
    "affine": (BITS, (32, 64, 128)),
    "mxfp4": ((4,), (32,)),
    "mxfp8": ((8,), (32,)),
    "nvfp4": ((4,), (16,)),
}
WORD_BITS = 32  # codes are packed into unsigned integers of this size
BYTES = mx.uint8  # the dtype of the scales in mxfp4, mxfp8 and nvfp4, which have no biases

Tensors = Mapping[str, mx.array]


def check_quantization(model: nn.Module, weights: Tensors, quantization: object) -> None:
    """Raise ValueError if the config or a quantised tensor of the model cannot be right.

    `model` is not quantised yet. `quantization` is the entry of config.json.
    """
    if not isinstance(quantization, Mapping):
        raise ValueError(f"quantization in config.json must be an object, not {quantization!r}")
    _check_entry("quantization", quantization)
    for name, layer in model.named_modules():
        if hasattr(layer, "to_quantized"):
            _check_own_entry(name, layer, quantization.get(name, True))
            _check_tensors(name, layer, weights)


def check_group_size(model: nn.Module, weights: Tensors, quantization: Mapping[str, Any]) -> None:
    """Raise ValueError if a quantised layer without an entry of its own cannot have the config's group size.

    For models that take it from there. mlx-lm finds it in the shapes of such a layer's tensors.
    """
    for name, layer in model.named_modules():
        uses_default = f"{name}.scales" in weights and quantization.get(name, True) is True
        if hasattr(layer, "to_quantized") and uses_default:
            _check_group_divides(name, layer, quantization["group_size"])


def check_tensors(model: nn.Module, weights: Tensors) -> None:
    """The same for a model whose config.json names a format of others, such as OpenAI's mxfp4."""
    for name, layer in model.named_modules():
        if hasattr(layer, "to_quantized"):
            _check_tensors(name, layer, weights)


def check_groups_of_16(
    modules: Mapping[str, nn.Module], weights: Tensors, layers: object
) -> Mapping[str, int]:
    """The bits of the layers with groups of 16 (models/groups_of_16.py), by name. Raises ValueError."""
    if not isinstance(layers, Mapping):
        raise ValueError(f"groups_of_16 in config.json must be an object, not {layers!r}")
    for name, bits in layers.items():
        layer = modules.get(name)
        if not isinstance(layer, nn.Linear | nn.Embedding):
            raise ValueError(f"groups_of_16 in config.json names {name}, which is no layer of the model")
        if type(bits) is not int or bits not in BITS:
            raise ValueError(f"groups_of_16 in config.json gives {name} {bits!r} bits")
        _check_tensors(name, layer, weights, needs_biases=False)
        num_rows, size = layer.weight.shape
        words, groups = (weights[f"{name}.{part}"].shape[-1] for part in ("weight", "scales"))
        if (words * WORD_BITS, groups * 16) != (size * bits, size):
            raise ValueError(f"{name} has no weights of {bits} bits in groups of 16 for {[num_rows, size]}")
    return layers


def _check_entry(what: str, entry: Mapping[str, Any]) -> None:
    for key, known in (("bits", BITS), ("group_size", GROUP_SIZES)):
        value = entry.get(key)
        if type(value) is not int or value not in known:
            choices = ", ".join(map(str, known))
            raise ValueError(f"{key} in the {what} in config.json must be one of {choices}, not {value!r}")
    mode = entry.get("mode", "affine")
    if not isinstance(mode, str) or mode not in MODES:
        choices = ", ".join(MODES)
        raise ValueError(f"mode in the {what} in config.json must be one of {choices}, not {mode!r}")


def _check_own_entry(name: str, layer: nn.Module, entry: object) -> None:
    """The entry of one layer: true, false, or an object with bits and group size."""
    if isinstance(entry, bool):
        return
    if not isinstance(entry, Mapping):
        raise ValueError(f"quantization of {name} in config.json must be an object, not {entry!r}")
    _check_entry(f"quantization of {name}", entry)
    mode = entry.get("mode", "affine")
    for key, known in zip(("bits", "group_size"), MODES[mode], strict=True):
        if entry[key] not in known:
            choices = " or ".join(map(str, known))
            raise ValueError(
                f"{key} in the quantization of {name} in config.json must be {choices} with mode {mode}, "
                f"not {entry[key]}"
            )
    _check_group_divides(name, layer, entry["group_size"])


def _check_group_divides(name: str, layer: nn.Module, group_size: int) -> None:
    size = layer.weight.shape[-1]
    if size % group_size:
        raise ValueError(
            f"{name}.weight has rows of {size}, which groups of {group_size} do not divide: "
            "check group_size in the quantization in config.json"
        )


def _check_tensors(name: str, layer: nn.Module, weights: Tensors, needs_biases: bool = True) -> None:
    weight, scales, biases = (weights.get(f"{name}.{part}") for part in ("weight", "scales", "biases"))
    if scales is None:
        if biases is not None or (weight is not None and weight.dtype == mx.uint32):
            raise ValueError(f"{name}.scales is missing")
        return
    if weight is None:
        raise ValueError(f"{name}.weight is missing, but there is {name}.scales")
    *rows, size = layer.weight.shape
    needed = f"for {name}, which is {[*rows, size]}"
    packed = [[*rows, bits * size // WORD_BITS] for bits in BITS if bits * size % WORD_BITS == 0]
    if weight.dtype != mx.uint32 or list(weight.shape) not in packed:
        raise ValueError(f"{name}.weight is {_named(weight)}: these are no {WORD_BITS}-bit words {needed}")
    grouped = [[*rows, size // group_size] for group_size in GROUP_SIZES if size % group_size == 0]
    if list(scales.shape) not in grouped or not _is_scale(scales):
        raise ValueError(f"{name}.scales is {_named(scales)}: these are no scales of groups {needed}")
    if scales.dtype == BYTES:
        return
    if biases is None:
        if needs_biases:
            raise ValueError(f"{name}.biases is missing")
        return
    if biases.shape != scales.shape or not mx.issubdtype(biases.dtype, mx.floating):
        raise ValueError(f"{name}.biases is {_named(biases)}, but {name}.scales is {_named(scales)}")


def _is_scale(array: mx.array) -> bool:
    return array.dtype == BYTES or mx.issubdtype(array.dtype, mx.floating)


def _named(array: mx.array) -> str:
    return f"{str(array.dtype).removeprefix('mlx.core.')} {list(array.shape)}"
