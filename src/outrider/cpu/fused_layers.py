"""Decoder layers of the common form as two native primitives instead of some twenty MLX operations.

    attention   norm, q, k, v, rope, cache write, attention of each row over its own cells, o, residual
    mlp         norm, gate, up, swiglu, down, residual          (native/extension/decoder_layer.h)

A layer is recognised by its parts: RMS norms, quantised projections, a rope that turns the halves of a head.
An MLP of another kind, such as experts, is computed as it is. Before a layer is used its results are compared
with those of the plain form, which shows what the parts do not: a scaled residual, a norm in another place.
A recognised layer gets a subclass of its class (models/layer_swaps.py).

A model on several ranks has its sums over the ranks after o and after down (rank_sums.py). There the
primitives give this rank's parts. The sum and the residual are MLX's operations.

The primitives take float32 with Outrider's caches and masks. Every other call goes to the plain form. They
add the low-rank terms of rows with adapters (cpu/low_rank.py).
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import rope_utils
from mlx_lm.models.smollm3 import NoPE

from outrider.cache.placement import Placement, Positions
from outrider.cache.ragged_kv import KVSpec, LayerView, RaggedKV
from outrider.cpu import extension, layer_runs
from outrider.cpu.huge_pages import use_huge_pages
from outrider.cpu.layer_runs import ATTENTION_LINEARS, MLP_LINEARS, LayerCall, LayerRun
from outrider.cpu.low_rank import native_terms
from outrider.cpu.quantized import CpuQuantizedLinear, interleave_weights, num_rows
from outrider.rank_sums import SummedLinear, other_sums, own_linear, without_sums

log = logging.getLogger("outrider.cpu.layers")

# The error that still counts as rounding, relative to the norm of the result. Chosen by hand: the plain form
# may round tokens to other codes, which changes single elements by 0.01 %.
TOLERANCE = 0.001
FAR_POSITION = 10_007  # where scaled ropes differ from plain ones; chosen by hand

_LAYER = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
_ATTENTION = (*ATTENTION_LINEARS, "rope")
_HEAD_NORMS = ("q_norm", "k_norm")
_NUM_HEADS = ("n_heads", "num_heads", "num_attention_heads")
_NUM_KV_HEADS = ("n_kv_heads", "num_kv_heads", "num_key_value_heads")
_SCALE = ("scale", "scaling")
_ROPES = (  # that turn the halves of a head by angles which depend on the position only
    nn.RoPE,
    rope_utils.Llama3RoPE,
    rope_utils.YarnRoPE,
    rope_utils.SuScaledRoPE,
    rope_utils.ProportionalRoPE,
    NoPE,  # turns nothing
)


class _NotFused(Exception):
    """Why a layer is not of the form that the primitives compute."""


def use_fused_layers(model: nn.Module) -> None:
    """Swap the decoder layers that the primitives can compute. Weights must not be changed afterwards."""
    interleave_weights(model)
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    use_huge_pages(list(weights.values()))
    ropes: dict[Hashable, _Rope] = {}
    for path, layer in model.named_modules():
        if "self_attn" not in layer or isinstance(layer, _FusedLayer):
            continue
        try:
            parts = _parts(layer, ropes)
            with without_sums(layer):  # a rank checks its own part
                _check(layer, parts)
        except _NotFused as reason:
            log.debug("%s computes operation by operation: %s", path or type(layer).__name__, reason)
            continue
        layer._fused = parts
        kind: type[nn.Module] = type(layer)
        layer.__class__ = _fused_class(kind)
    if any(type(module) is CpuQuantizedLinear for _, module in model.named_modules()):
        _use_native_norms(model)


def use_layer_runs(model: nn.Module, dry_run: Callable[[], Placement]) -> None:
    """Compute consecutive fused layers together. `dry_run`: builds a pass over the model."""
    fused = [module for _, module in model.named_modules() if isinstance(module, _FusedLayer)]
    if not any(layer._fused.is_whole for layer in fused):
        return
    with layer_runs.noting() as calls:
        place = dry_run()
    layer_runs.use_layer_runs(calls, place.layer_buffers)


def plain_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that a module had before `use_fused_layers`."""
    if kind is _NativeNorm:
        return nn.RMSNorm
    return kind.__bases__[1] if issubclass(kind, _FusedLayer) else kind


@dataclass(frozen=True, eq=False, slots=True)
class _Rope:
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


@dataclass(frozen=True, slots=True)
class _Parts:
    """A layer's primitives, and its rope."""

    attention: Any
    mlp: Any | None  # None: the layer's own
    rope: _Rope
    is_whole: bool = True  # False: a rank's part of a divided layer

    def write_cells(self, layer: Any, x: mx.array, cache: LayerView) -> None:
        """The keys and values of a pass whose output nobody reads."""
        place = cache.placement
        buffers = self.attention.write_cells(
            x,
            cache.arrays(),
            self.rope.of_pass(place, x.shape[1]),
            place.starts,
            place.num_fed,
            place.places,
            place.has_blocks,
            *native_terms(place.adapters, (layer.self_attn, ATTENTION_LINEARS)),
        )
        cache.put(buffers)

    def attend(self, layer: Any, x: mx.array, cache: LayerView, window: int) -> mx.array:
        place = cache.placement
        # No name for the old buffers: whoever holds them makes the primitive copy them.
        h, *buffers = self.attention(
            x,
            cache.arrays(),
            self.rope.of_pass(place, x.shape[1]),
            place.starts,
            place.num_fed,
            place.places,
            place.has_blocks,
            window,
            *native_terms(place.adapters, (layer.self_attn, ATTENTION_LINEARS)),
        )
        cache.put(buffers)
        h = _with_residual(layer.self_attn.o_proj, x, h)
        place.num_native += 1
        place.launch_every_few_layers(h)  # not the buffers: MLX would hold them, and the next pass copy them
        return h


class _FusedLayer:
    _fused: _Parts
    _run: LayerRun | None = None  # that the layer belongs to
    _number_in_run = 0

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        is_ours, run = type(cache) is LayerView, self._run
        if is_ours and run is not None and run.has_computed(self._number_in_run, x, mask, cache):
            return x
        if is_ours and x.dtype == mx.float32 == cache.spec.dtype:
            if cache.placement.only_cells:
                self._fused.write_cells(self, x, cache)
                return x
            window = cache.placement.window_of(mask)
            if run is not None and self._number_in_run == 0 and run.begins_with(cache, window):
                return run.compute(x, cache.placement)
            if window is not None:
                return self._alone(x, cache, window)
        log.debug("a layer computes operation by operation: not float32, or not Outrider's cache and mask")
        return super().__call__(x, mask, cache)  # type: ignore[misc]

    def _alone(self, x: mx.array, cache: LayerView, window: int) -> mx.array:
        parts = self._fused
        out = _run(self, parts, x, cache, window)
        if parts.is_whole:
            native = parts.attention, parts.mlp
            layer_runs.note(LayerCall(self, native, parts.rope, cache.kv, window, x, out))
        return out


def _run(layer: Any, parts: _Parts, x: mx.array, cache: LayerView, window: int) -> mx.array:
    h, place = parts.attend(layer, x, cache, window), cache.placement
    if parts.mlp is not None:
        out = parts.mlp(h, place.num_fed, *native_terms(place.adapters, (layer.mlp, MLP_LINEARS)))
        return _with_residual(layer.mlp.down_proj, h, out)
    return h + layer.mlp(layer.post_attention_layernorm(h))


def _with_residual(last: nn.Module, x: mx.array, out: mx.array) -> mx.array:
    """`out`: of a primitive whose last linear layer is `last`. On several ranks it is a part, without x."""
    return x + last.total(out) if isinstance(last, SummedLinear) else out


@cache
def _fused_class(kind: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_FusedLayer, kind), names)


class _NativeNorm(nn.RMSNorm):
    """A norm outside of fused layers: one operation instead of ten."""

    _native: Any

    def __call__(self, x: mx.array) -> mx.array:
        return self._native(x) if x.dtype == mx.float32 else super().__call__(x)


def _use_native_norms(model: nn.Module) -> None:
    for _, module in model.named_modules():
        if type(module) is nn.RMSNorm and module.weight.size % 16 == 0:
            module._native = extension.loaded().RMSNorm(module.weight, module.eps)
            module.__class__ = _NativeNorm


# Recognition ------------------------------------------------------------------------------------------------


def _parts(layer: nn.Module, ropes: dict[Hashable, _Rope]) -> _Parts:
    """Raises _NotFused."""
    _require_members(layer, _LAYER)
    _require_call(layer, ["x", "mask", "cache"])
    if sums := other_sums(layer):
        raise _NotFused(f"its {type(sums[0]).__name__} communicates with other ranks")
    attention = layer.self_attn
    _require_members(attention, _ATTENTION, _HEAD_NORMS)
    _require_call(attention, ["x", "mask", "cache"])
    for linear in _own_parts(attention, ATTENTION_LINEARS):
        _require_quantized(linear)  # before anything asks for the extension: it is built for such layers only
    rope = _rope(attention.rope, ropes)
    try:
        native_attention = extension.loaded().Attention(
            _norm(layer.input_layernorm),
            *map(_linear, _own_parts(attention, ATTENTION_LINEARS)),
            *(_norm(attention[name]) if name in attention else None for name in _HEAD_NORMS),
            _attribute(attention, _NUM_HEADS),
            _attribute(attention, _NUM_KV_HEADS),
            rope.dims,
            _attribute(attention, _SCALE),
            isinstance(attention.o_proj, SummedLinear),
        )
    except ValueError as error:
        raise _NotFused(str(error)) from None
    is_whole = not any(
        isinstance(last, SummedLinear) for last in (attention.o_proj, layer.mlp.get("down_proj"))
    )
    return _Parts(native_attention, _mlp(layer), rope, is_whole)


def _mlp(layer: nn.Module) -> Any | None:
    try:
        _require_members(layer.mlp, MLP_LINEARS)
        _require_call(layer.mlp, ["x"])
        return extension.loaded().MLP(
            _norm(layer.post_attention_layernorm),
            *map(_linear, _own_parts(layer.mlp, MLP_LINEARS)),
            isinstance(layer.mlp.down_proj, SummedLinear),
        )
    except (_NotFused, ValueError) as reason:
        log.debug("an MLP computes operation by operation: %s", reason)
        return None


def _members(module: nn.Module) -> set[str]:
    """The names of a module's arrays and of the modules in it."""
    return {name for name, value in module.items() if isinstance(value, mx.array | dict | list)}


def _require_members(module: Any, needed: Sequence[str], allowed: Sequence[str] = ()) -> None:
    found = _members(module) if isinstance(module, nn.Module) else set()
    if not {*needed} <= found <= {*needed, *allowed}:
        raise _NotFused(f"a {type(module).__name__} has {sorted(found)}")


def _require_call(module: nn.Module, parameters: Sequence[str]) -> None:
    """mlx-lm's own code, called with these parameters: not that of another swap."""
    call = type(module).__call__
    if not getattr(call, "__module__", "").startswith("mlx_lm.models."):
        raise _NotFused(f"{type(module).__name__} is not mlx-lm's own")
    if (found := list(inspect.signature(call).parameters)[1:]) != list(parameters):
        raise _NotFused(f"{type(module).__name__} is called with {found}")


def _attribute(module: nn.Module, names: Sequence[str]) -> Any:
    for name in names:
        if isinstance(value := getattr(module, name, None), int | float):
            return value
    raise _NotFused(f"a {type(module).__name__} has none of {names}")


def _norm(norm: Any) -> Any:
    if type(norm) not in (nn.RMSNorm, _NativeNorm):
        raise _NotFused(f"a norm is a {type(norm).__name__}")
    return extension.loaded().RMSNorm(norm.weight, norm.eps)


def _require_quantized(linear: Any) -> None:
    if type(linear) is not CpuQuantizedLinear:
        raise _NotFused(f"a projection is a {type(linear).__name__}")


def _own_parts(module: nn.Module, names: Sequence[str]) -> list[Any]:
    """The linear layers with these names. The last one may be summed over the ranks: here without the sum."""
    *others, last = (module[name] for name in names)
    return [*others, own_linear(last)]


def _linear(linear: Any) -> Any:
    _require_quantized(linear)
    _require_members(linear, ("weight", "scales"), ("biases", "bias"))
    weights = linear["weight"], linear["scales"], linear.get("biases")
    weight_format = linear.group_size, linear.bits, linear.mode
    return extension.loaded().Linear(*weights, *weight_format, linear.get("bias"))


def _rope(module: Any, known: dict[Hashable, _Rope]) -> _Rope:
    plain = getattr(module, "plain", module)  # mrope has the plain one inside
    if not isinstance(plain, _ROPES) or getattr(plain, "traditional", False):
        raise _NotFused(f"the rope is a {type(plain).__name__}, or turns neighbouring elements")
    key = _key(module)
    if key not in known:
        dims = 0 if isinstance(plain, NoPE) else _attribute(plain, ("dims", "dim"))
        known[key] = _Rope(module, dims, _native_angles(module, plain, dims) if dims else None)
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
    expected = _Rope(module, dims, None).turned(3, 100, positions)
    return native if mx.array_equal(native(positions, 100), expected) else None


def _key(module: nn.Module) -> Hashable:
    """Equal for modules that compute the same."""
    scalars = {name: x for name, x in vars(module).items() if isinstance(x, int | float | str | None)}
    parts = {
        name: _key(part) if isinstance(part, nn.Module) else np.array(part).tobytes()
        for name, part in module.items()
    }
    return type(module), tuple(sorted(scalars.items())), tuple(sorted(parts.items()))


# The comparison with the plain form -------------------------------------------------------------------------


def _check(layer: nn.Module, parts: _Parts) -> None:
    """Raises _NotFused if attention, the whole layer or the cells differ from the plain form's."""
    attention, norm = layer.self_attn, layer.input_layernorm
    x = mx.random.normal((2, 3, norm.weight.size), key=mx.random.key(0))
    positions = mx.array([FAR_POSITION, 0])
    place = Placement([1, 0], mx.array([5, 0]), mx.array([3, 3]), 3, 8, 16, positions=positions)
    plain, plain_attention, fused, fused_attention = (_filled_view(attention, place) for _ in range(4))
    mask = place.mask(None)
    pairs = {
        "the layer": (_run(layer, parts, x, fused, 0) - x, layer(x, mask, plain) - x),
        "attention": (
            parts.attend(layer, x, fused_attention, 0) - x,
            attention(norm(x), mask, plain_attention),
        ),
        "keys": (fused.keys, plain.keys),
        "values": (fused.arrays()[1], plain.arrays()[1]),
    }
    for name, (found, expected) in pairs.items():
        error = float(mx.linalg.norm(found - expected) / mx.linalg.norm(expected))
        if not error <= TOLERANCE:
            raise _NotFused(f"{name} differs from the plain form by {error:.2g}")


def _filled_view(attention: nn.Module, place: Placement) -> LayerView:
    """Buffers whose cells are filled, the same each time."""
    num_heads = _attribute(attention, _NUM_KV_HEADS)
    key_dim, value_dim = (num_rows(attention[name]) // num_heads for name in ("k_proj", "v_proj"))
    kv = RaggedKV(KVSpec(num_heads, key_dim, value_dim, mx.float32))
    kv.resize(len(place.slots), place.capacity)
    key, value = mx.random.split(mx.random.key(1))
    kv.keys = mx.random.normal(kv.keys.shape, key=key)
    kv.values = mx.random.normal(kv.values.shape, key=value)
    return LayerView(kv, place)
