"""Modules as parts of native primitives: norms, quantised projections, ropes. Others are refused by name.

Fused layers (cpu/fused_layers.py) and MTP heads (cpu/draft_head.py) are made of these parts.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import rope_utils
from mlx_lm.models.smollm3 import NoPE

from outrider.cache.placement import Placement, Positions
from outrider.cpu import extension
from outrider.cpu.quantized import CpuQuantizedEmbedding, CpuQuantizedLinear

FAR_POSITION = 10_007  # where scaled ropes differ from plain ones; chosen by hand
_ROPES = (  # that turn the halves of a head by angles which depend on the position only
    nn.RoPE,
    rope_utils.Llama3RoPE,
    rope_utils.YarnRoPE,
    rope_utils.SuScaledRoPE,
    rope_utils.ProportionalRoPE,
    NoPE,  # turns nothing
)


class NotFused(Exception):
    """Why a layer, or an MTP head, is not of the form that the primitives compute."""


class NativeNorm(nn.RMSNorm):
    """A norm outside of fused layers: one operation instead of ten."""

    _native: Any

    def __call__(self, x: mx.array) -> mx.array:
        return self._native(x) if x.dtype == mx.float32 else super().__call__(x)


def _members(module: nn.Module) -> set[str]:
    """The names of a module's arrays and of the modules in it."""
    return {name for name, value in module.items() if isinstance(value, mx.array | dict | list)}


def require_members(module: Any, needed: Sequence[str], allowed: Sequence[str] = ()) -> None:
    found = _members(module) if isinstance(module, nn.Module) else set()
    if not {*needed} <= found <= {*needed, *allowed}:
        raise NotFused(f"a {type(module).__name__} has {sorted(found)}")


def require_call(module: nn.Module, parameters: Sequence[str]) -> None:
    """mlx-lm's own code, called with these parameters: not that of another swap."""
    call = type(module).__call__
    if not getattr(call, "__module__", "").startswith("mlx_lm.models."):
        raise NotFused(f"{type(module).__name__} is not mlx-lm's own")
    if (found := list(inspect.signature(call).parameters)[1:]) != list(parameters):
        raise NotFused(f"{type(module).__name__} is called with {found}")


def attribute(module: nn.Module, names: Sequence[str]) -> Any:
    for name in names:
        if isinstance(value := getattr(module, name, None), int | float):
            return value
    raise NotFused(f"a {type(module).__name__} has none of {names}")


def native_norm(norm: Any) -> Any:
    if type(norm) not in (nn.RMSNorm, NativeNorm):
        raise NotFused(f"a norm is a {type(norm).__name__}")
    return extension.loaded().RMSNorm(norm.weight, norm.eps)


def require_quantized(linear: Any) -> None:
    if type(linear) is not CpuQuantizedLinear:
        raise NotFused(f"a projection is a {type(linear).__name__}")


def native_linear(linear: Any) -> Any:
    """A quantised projection; an embedding too, whose rows are read."""
    if type(linear) is not CpuQuantizedEmbedding:
        require_quantized(linear)
    require_members(linear, ("weight", "scales"), ("biases", "bias"))
    weights = linear["weight"], linear["scales"], linear.get("biases")
    weight_format = linear.group_size, linear.bits, linear.mode
    return extension.loaded().Linear(*weights, *weight_format, linear.get("bias"))


@dataclass(frozen=True, eq=False, slots=True)
class Rope:
    """A rope, as the angles that it turns the halves of a head by. Layers that turn alike share one."""

    module: nn.Module
    dims: int  # elements of a head that are turned
    native: Any | None  # computes the same angles to the bit; None: only the module knows

    def of_pass(self, place: Placement, width: int) -> mx.array:
        """The angles of a pass, which its layers share: the cosines of every token, then the sines.
        [rows, 1, width, dims]"""
        if self not in place.angles:
            place.angles[self] = self._angles(place, width)
        return place.angles[self]

    def _angles(self, place: Placement, width: int) -> mx.array:
        if self.native is not None and isinstance(place.positions, mx.array):
            return self.native(place.positions, width)
        return self.turned(len(place.slots), width, place.positions)

    def turned(self, rows: int, width: int, offset: Positions) -> mx.array:
        """What the module makes of (1, .., 1, 0, .., 0): the cosines and the sines."""
        ones = (mx.arange(self.dims) < self.dims // 2).astype(mx.float32)
        return self.module(mx.broadcast_to(ones, (rows, 1, width, self.dims)), offset=offset)


def native_rope(module: Any, known: dict[Hashable, Rope]) -> Rope:
    plain = getattr(module, "plain", module)  # mrope has the plain one inside
    if not isinstance(plain, _ROPES) or getattr(plain, "traditional", False):
        raise NotFused(f"the rope is a {type(plain).__name__}, or turns neighbouring elements")
    key = _key(module)
    if key not in known:
        dims = 0 if isinstance(plain, NoPE) else attribute(plain, ("dims", "dim"))
        known[key] = Rope(module, dims, _native_angles(module, plain, dims) if dims else None)
    return known[key]


def _native_angles(module: nn.Module, plain: nn.Module, dims: int) -> Any | None:
    """None if there are differences to the module, even of one bit."""
    if isinstance(plain, nn.RoPE):
        half = dims // 2
        frequencies = mx.exp(mx.arange(half, dtype=mx.float32) * (-math.log(plain.base) / half))
        native = extension.loaded().RopeAngles(frequencies, plain.scale, 1.0)
    else:
        magnitude = getattr(plain, "mscale", getattr(plain, "_scale", 1.0))
        native = extension.loaded().RopeAngles(1 / plain._freqs, 1.0, magnitude)
    positions = mx.array([0, 1000, FAR_POSITION])
    expected = Rope(module, dims, None).turned(3, 100, positions)
    return native if mx.array_equal(native(positions, 100), expected) else None


def _key(module: nn.Module) -> Hashable:
    """Equal for modules that compute the same."""
    scalars = {name: x for name, x in vars(module).items() if isinstance(x, int | float | str | None)}
    parts = {
        name: _key(part) if isinstance(part, nn.Module) else np.array(part).tobytes()
        for name, part in module.items()
    }
    return type(module), tuple(sorted(scalars.items())), tuple(sorted(parts.items()))
