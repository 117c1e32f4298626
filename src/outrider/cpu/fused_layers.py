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

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from outrider.cache.placement import Placement
from outrider.cache.ragged_kv import KVSpec, LayerView, RaggedKV
from outrider.cpu import extension, layer_runs
from outrider.cpu.huge_pages import use_huge_pages
from outrider.cpu.layer_runs import ATTENTION_LINEARS, MLP_LINEARS, LayerCall, LayerRun
from outrider.cpu.low_rank import native_terms
from outrider.cpu.native_parts import (
    FAR_POSITION,
    NativeNorm,
    NotFused,
    Rope,
    attribute,
    native_linear,
    native_norm,
    native_rope,
    require_call,
    require_members,
    require_quantized,
)
from outrider.cpu.quantized import CpuQuantizedLinear, interleave_weights, num_rows
from outrider.rank_sums import SummedLinear, other_sums, own_linear, without_sums

log = logging.getLogger("outrider.cpu.layers")

# The error that still counts as rounding, relative to the norm of the result. Chosen by hand: the plain form
# may round tokens to other codes, which changes single elements by 0.01 %.
TOLERANCE = 0.001
_LAYER = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
_ATTENTION = (*ATTENTION_LINEARS, "rope")
_HEAD_NORMS = ("q_norm", "k_norm")
_NUM_HEADS = ("n_heads", "num_heads", "num_attention_heads")
_NUM_KV_HEADS = ("n_kv_heads", "num_kv_heads", "num_key_value_heads")
_SCALE = ("scale", "scaling")


def use_fused_layers(model: nn.Module) -> None:
    """Swap the decoder layers that the primitives can compute. Weights must not be changed afterwards."""
    interleave_weights(model)
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    use_huge_pages(list(weights.values()))
    ropes: dict[Hashable, Rope] = {}
    for path, layer in model.named_modules():
        if "self_attn" not in layer or isinstance(layer, _FusedLayer):
            continue
        try:
            parts = _parts(layer, ropes)
            with without_sums(layer):  # a rank checks its own part
                _check(layer, parts)
        except NotFused as reason:
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
    if kind is NativeNorm:
        return nn.RMSNorm
    return kind.__bases__[1] if issubclass(kind, _FusedLayer) else kind


@dataclass(frozen=True, slots=True)
class Parts:
    """A layer's primitives, and its rope."""

    attention: Any
    mlp: Any | None  # None: the layer's own
    rope: Rope
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
    _fused: Parts
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


def _run(layer: Any, parts: Parts, x: mx.array, cache: LayerView, window: int) -> mx.array:
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


def _use_native_norms(model: nn.Module) -> None:
    for _, module in model.named_modules():
        if type(module) is nn.RMSNorm and module.weight.size % 16 == 0:
            module._native = extension.loaded().RMSNorm(module.weight, module.eps)
            module.__class__ = NativeNorm


# Recognition ------------------------------------------------------------------------------------------------


def _parts(layer: nn.Module, ropes: dict[Hashable, Rope]) -> Parts:
    """Raises NotFused."""
    require_members(layer, _LAYER)
    require_call(layer, ["x", "mask", "cache"])
    if sums := other_sums(layer):
        raise NotFused(f"its {type(sums[0]).__name__} communicates with other ranks")
    attention = layer.self_attn
    require_members(attention, _ATTENTION, _HEAD_NORMS)
    require_call(attention, ["x", "mask", "cache"])
    for linear in _own_parts(attention, ATTENTION_LINEARS):
        require_quantized(linear)  # before anything asks for the extension: it is built for such layers only
    rope = native_rope(attention.rope, ropes)
    try:
        native_attention = extension.loaded().Attention(
            native_norm(layer.input_layernorm),
            *map(native_linear, _own_parts(attention, ATTENTION_LINEARS)),
            *(native_norm(attention[name]) if name in attention else None for name in _HEAD_NORMS),
            attribute(attention, _NUM_HEADS),
            attribute(attention, _NUM_KV_HEADS),
            rope.dims,
            attribute(attention, _SCALE),
            isinstance(attention.o_proj, SummedLinear),
        )
    except ValueError as error:
        raise NotFused(str(error)) from None
    is_whole = not any(
        isinstance(last, SummedLinear) for last in (attention.o_proj, layer.mlp.get("down_proj"))
    )
    return Parts(native_attention, _mlp(layer), rope, is_whole)


def _mlp(layer: nn.Module) -> Any | None:
    try:
        require_members(layer.mlp, MLP_LINEARS)
        require_call(layer.mlp, ["x"])
        return extension.loaded().MLP(
            native_norm(layer.post_attention_layernorm),
            *map(native_linear, _own_parts(layer.mlp, MLP_LINEARS)),
            isinstance(layer.mlp.down_proj, SummedLinear),
        )
    except (NotFused, ValueError) as reason:
        log.debug("an MLP computes operation by operation: %s", reason)
        return None


def _own_parts(module: nn.Module, names: Sequence[str]) -> list[Any]:
    """The linear layers with these names. The last one may be summed over the ranks: here without the sum."""
    *others, last = (module[name] for name in names)
    return [*others, own_linear(last)]


def fused_parts(layer: nn.Module) -> Parts:
    """The primitives of a layer that was swapped."""
    parts = getattr(layer, "_fused", None)
    if not isinstance(parts, Parts):
        raise NotFused(f"a {type(layer).__name__} computes operation by operation")
    return parts


# The comparison with the plain form -------------------------------------------------------------------------


def _check(layer: nn.Module, parts: Parts) -> None:
    """Raises NotFused if attention, the whole layer or the cells differ from the plain form's."""
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
            raise NotFused(f"{name} differs from the plain form by {error:.2g}")


def _filled_view(attention: nn.Module, place: Placement) -> LayerView:
    """Buffers whose cells are filled, the same each time."""
    num_heads = attribute(attention, _NUM_KV_HEADS)
    key_dim, value_dim = (num_rows(attention[name]) // num_heads for name in ("k_proj", "v_proj"))
    kv = RaggedKV(KVSpec(num_heads, key_dim, value_dim, mx.float32))
    kv.resize(len(place.slots), place.capacity)
    key, value = mx.random.split(mx.random.key(1))
    kv.keys = mx.random.normal(kv.keys.shape, key=key)
    kv.values = mx.random.normal(kv.values.shape, key=value)
    return LayerView(kv, place)
