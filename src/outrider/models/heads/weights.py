"""Turns the stored tensors of a head into the parameters of its module.

8-bit floats with block scales   dequantised
experts                          stacked into one tensor for each projection
latent attention, other names    converted by the family's own `sanitize`, under the names of a trunk's layer
zero-centred norms               1 is added if the files are as published (Qwen hybrids)
MLX's quantised tensors          stay as they are (heads/quantization.py)
"""

from __future__ import annotations

import copy
import re

import mlx.core as mx
import mlx.nn as nn

from outrider.models.heads.blocks import Block, families
from outrider.models.heads.errors import HeadError
from outrider.models.heads.norm_format import FP8_SCALE

Tensors = dict[str, mx.array]
FP8_BLOCK = 128
ZERO_CENTRED = frozenset({"qwen3_next", "qwen3_5"})  # families that publish norm weights minus 1
EXPERT = re.compile(r"(?P<mlp>.*mlp\.)experts\.(?P<number>\d+)\.(?P<rest>(gate|up|down)_proj\..*)")
FUSED_EXPERTS = re.compile(
    r"(?P<mlp>.*mlp\.)experts\.(?P<projection>gate_up_proj|down_proj)(?P<part>\.(weight|scales|biases))?"
)
NORM = re.compile(r"norm(_embedding|_hidden)?\.weight$")


def dequantised_fp8(tensors: Tensors) -> Tensors:
    """8-bit floats times their scales: one scale for each block of 128 x 128."""
    whole = {name: array for name, array in tensors.items() if not name.endswith(FP8_SCALE)}
    for name in tensors.keys() - whole.keys():
        weight = name.removesuffix(FP8_SCALE)
        if weight not in tensors:
            raise HeadError(f"only part of a head: there is {name}, but no {weight}.")
        rows, columns = tensors[weight].shape
        scales = tensors[name].astype(mx.float32)
        scales = mx.repeat(mx.repeat(scales, FP8_BLOCK, 0)[:rows], FP8_BLOCK, 1)[:, :columns]
        whole[weight] = (mx.from_fp8(tensors[weight], mx.float32) * scales).astype(mx.bfloat16)
    return whole


def stacked(tensors: Tensors) -> Tensors:
    """One tensor for each projection. Files have one for each expert, or one for gate and up.

    Quantised experts have scales and biases of the same rows.
    """
    rest = dict(tensors)
    several: dict[str, dict[int, str]] = {}
    for name, array in tensors.items():
        if match := EXPERT.fullmatch(name):
            stack = f"{match['mlp']}switch_mlp.{match['rest']}"
            several.setdefault(stack, {})[int(match["number"])] = name
        elif match := FUSED_EXPERTS.fullmatch(name):
            del rest[name]
            into, part = f"{match['mlp']}switch_mlp.", match["part"] or ".weight"
            if match["projection"] == "down_proj":
                rest[f"{into}down_proj{part}"] = array
            else:
                rest[f"{into}gate_proj{part}"], rest[f"{into}up_proj{part}"] = mx.split(array, 2, axis=-2)
    for stack, names in several.items():
        last = max(names)
        every = [names[last].replace(f"experts.{last}.", f"experts.{i}.") for i in range(last + 1)]
        rest[stack] = mx.stack([rest.pop(name) for name in every])  # a KeyError names the missing expert
    return rest


def sanitized(model: nn.Module, block: Block, tensors: Tensors) -> Tensors:
    """The block's tensors after the `sanitize` of the trunk's model, under the names of one of its layers."""
    there = {_alias(name, block.aliases): array for name, array in tensors.items()}
    alone = copy.copy(model)  # some sanitize methods remove parts of their model
    found: Tensors = alone.sanitize(there) if hasattr(alone, "sanitize") else there
    back = tuple((theirs, ours) for ours, theirs in block.aliases)
    return {_alias(name, back): array for name, array in found.items()}


def _alias(name: str, aliases: tuple[tuple[str, str], ...]) -> str:
    return next((new + name.removeprefix(old) for old, new in aliases if name.startswith(old)), name)


def is_zero_centred(model: nn.Module, name: str) -> bool:
    """True if the family publishes this parameter minus 1."""
    return not ZERO_CENTRED.isdisjoint(families(model)) and NORM.search(name) is not None
