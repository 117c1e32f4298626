"""Quantised layers of a head, in MLX's formats: those that a file stores, and those that `--bits` writes.

A quantised layer stores weight (codes, packed into uint32), scales and, in affine formats, biases:

    weight  [..., outputs, inputs * bits / 32]
    scales  [..., outputs, inputs / group_size]    biases alike

A layer of the module knows the number of its inputs, so its bits and group size follow from these shapes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from outrider.config import DEFAULT_HEAD_GROUP_SIZE, HEAD_BITS, HEAD_GROUP_SIZES
from outrider.models.heads.errors import HeadError
from outrider.models.heads.head_files import QUANTIZATION
from outrider.models.trunk import Trunk

AFFINE_BITS, AFFINE_GROUP_SIZES = (1, 2, 3, 4, 5, 6, 8), (32, 64, 128)  # that MLX can multiply
UINT8_SCALES = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}  # (bits, group size) -> mode


class WrongTensor(ValueError):
    """A quantised tensor cannot be used."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")
        self.name = name  # as the head's module names it
        self.problem = problem


@dataclass(frozen=True)
class Quantization:
    """The affine format of the layers that are to be written quantised."""

    bits: int
    group_size: int = DEFAULT_HEAD_GROUP_SIZE

    def __post_init__(self) -> None:
        for name, value, known in (
            ("--bits", self.bits, HEAD_BITS),
            ("--group-size", self.group_size, HEAD_GROUP_SIZES),
        ):
            if value not in known:
                raise HeadError(f"{name} must be one of {', '.join(map(str, known))}, not {value!r}.")

    def __str__(self) -> str:
        return f"{self.bits} bits in groups of {self.group_size}"


@dataclass(frozen=True)
class QuantizedLayers:
    """What became of the linear layers of a head, by path."""

    how: Quantization
    others: Mapping[str, dict[str, Any]]  # layers that the family wants in another format, such as routers
    left: tuple[str, ...]  # layers that stay as they are

    def renamed(self, stored_name: Callable[[str], str]) -> QuantizedLayers:
        """By the paths of a file. `stored_name` maps the names of parameters."""

        def stored(path: str) -> str:
            return stored_name(f"{path}.weight").removesuffix(".weight")

        others = {stored(path): entry for path, entry in self.others.items()}
        return QuantizedLayers(self.how, others, tuple(stored(path) for path in self.left))

    def plus(self, deeper: QuantizedLayers) -> QuantizedLayers:
        left = dict.fromkeys((*self.left, *deeper.left))
        return QuantizedLayers(self.how, {**self.others, **deeper.others}, tuple(left))

    def metadata(self) -> dict[str, str]:
        """For a head file with these paths."""
        entry = {"group_size": self.how.group_size, "bits": self.how.bits, "mode": "affine", **self.others}
        return {QUANTIZATION: json.dumps(entry)}

    def describe(self, bytes_before: int, bytes_after: int) -> str:
        text = f"Quantised to {self.how}: {bytes_before / 1e6:.1f} MB before, {bytes_after / 1e6:.1f} MB now."
        if self.left:
            reason = "the group size does not divide their inputs, or the family keeps them"
            text += f"\nNot quantised ({reason}): {', '.join(self.left)}."
        return text


def quantize_layers(head: nn.Module, how: Quantization, trunk: Trunk) -> QuantizedLayers:
    """Quantise the linear layers of a head as mlx-lm quantises the layers of its trunk.

    A layer stays as it is if the group size does not divide the number of its inputs.
    """
    rule: Callable[[str, nn.Module], Any]
    rule = getattr(trunk.model, "quant_predicate", None) or (lambda path, layer: True)
    asked = {"group_size": how.group_size, "bits": how.bits, "mode": "affine"}
    others: dict[str, dict[str, Any]] = {}
    done, left = [], []

    def choose(path: str, layer: nn.Module) -> dict[str, Any] | bool:
        if not hasattr(layer, "to_quantized"):
            return False
        wanted = rule(path, layer)
        chosen = asked | (wanted if isinstance(wanted, dict) else {})
        if not wanted or layer.weight.shape[-1] % chosen["group_size"]:
            left.append(path)
            return False
        done.append(path)
        if chosen != asked:
            others[path] = chosen
        return chosen

    nn.quantize(head, class_predicate=choose)
    if not done:
        raise HeadError(
            f"no layer of the head can be quantised in groups of {how.group_size}: no layer's number of "
            "inputs is a multiple of it. Choose a smaller --group-size."
        )
    return QuantizedLayers(how, others, tuple(left))


def quantize_as_stored(head: nn.Module, tensors: Mapping[str, mx.array]) -> None:
    """Give the head quantised layers where these tensors have scales. Raises WrongTensor."""

    def stored_format(path: str, layer: nn.Module) -> dict[str, Any] | bool:
        codes, scales = tensors.get(f"{path}.weight"), tensors.get(f"{path}.scales")
        if codes is None or not hasattr(layer, "to_quantized"):
            return False
        if scales is None and codes.dtype == mx.uint32:
            raise WrongTensor(f"{path}.scales", "is missing, and the weight is quantised (uint32)")
        return scales is not None and _stored_format(path, layer.weight.shape[-1], tensors)

    nn.quantize(head, class_predicate=stored_format)


def _stored_format(path: str, num_inputs: int, tensors: Mapping[str, mx.array]) -> dict[str, Any]:
    codes, scales = tensors[f"{path}.weight"], tensors[f"{path}.scales"]
    if codes.dtype != mx.uint32:
        raise WrongTensor(f"{path}.weight", f"has scales, but its dtype is {dtype_name(codes)}, not uint32")
    num_groups = scales.shape[-1] if scales.ndim else 0
    if not num_groups or num_inputs % num_groups:
        raise WrongTensor(
            f"{path}.scales", f"has {num_groups} groups, which do not divide the {num_inputs} inputs"
        )
    group_size, bits = num_inputs // num_groups, codes.shape[-1] * 32 / num_inputs
    mode = _mode(path, scales, bits, group_size)
    if mode == "affine":
        if bits not in AFFINE_BITS:
            raise WrongTensor(f"{path}.weight", f"has {bits:g} bits for each of {num_inputs} inputs")
        if group_size not in AFFINE_GROUP_SIZES:
            raise WrongTensor(f"{path}.scales", f"has groups of {group_size}, which MLX does not know")
        biases = tensors.get(f"{path}.biases")
        if biases is not None and biases.dtype != scales.dtype:
            raise WrongTensor(
                f"{path}.biases", f"is {dtype_name(biases)}, and its scales are {dtype_name(scales)}"
            )
    return {"group_size": group_size, "bits": int(bits), "mode": mode}


def _mode(path: str, scales: mx.array, bits: float, group_size: int) -> str:
    if mx.issubdtype(scales.dtype, mx.floating):
        return "affine"
    if scales.dtype == mx.uint8 and (int(bits), group_size) in UINT8_SCALES:
        return UINT8_SCALES[int(bits), group_size]
    raise WrongTensor(
        f"{path}.scales",
        f"is {dtype_name(scales)}, which is no dtype of scales for {bits:g} bits in groups of {group_size}",
    )


def dtype_name(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")
