"""What of a layer is not a matrix product, for Linux on x86, where MLX's own takes up to a third of a step.

MLX computes `exp` on these CPUs one element at a time: 12 ns, in a sigmoid 16; a masking `where` takes 4.4. A
power of two takes 4.4 (2.6 for those that are hidden), a minimum and other arithmetic 0.2. So

    silu(x)      x / (1 + 2^(-x log2 e))
    attention    the queries' scale holds log2 e; `minimum` with -inf hides cells; weights are powers of two;
                 the queries of all heads that share a key are one product
    rope         angles are the same in all layers: sines and cosines once a pass, to the bit what MLX gives

All in float32, and for our own caches: anything else goes to mlx-lm's functions.
"""

from __future__ import annotations

import math
import platform
import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations, base

from outrider.cache.ragged_kv import LayerView, Placement

_LOG2_E = math.log2(math.e)
_ONE, _TWO, _MINUS_LOG2_E = mx.array(1.0), mx.array(2.0), mx.array(-_LOG2_E)


def applies() -> bool:
    """Whether this is such a CPU: others, and GPUs, have an `exp` that is fast."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return sys.platform == "linux" and is_x86 and mx.default_device() == mx.Device(mx.cpu)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    if gate.dtype != mx.float32:
        return activations.swiglu(gate, x)
    return gate / (_ONE + mx.power(_TWO, gate * _MINUS_LOG2_E)) * x


def attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's scaled_dot_product_attention.

    queries [rows, heads, width, dim]; keys, values [rows, kv_heads, cells, dim]; mask [rows, 1, width, cells]
    """
    if sinks is not None or not isinstance(cache, LayerView) or not _is_plain(queries, keys, values, mask):
        return base.scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
    rows, num_heads, width, _ = queries.shape
    _, kv_heads, num_cells, _ = keys.shape
    folded = (rows, kv_heads, num_heads // kv_heads * width)
    scores = (queries * (scale * _LOG2_E)).reshape(*folded, -1) @ keys.swapaxes(2, 3)
    if mask is not None:
        scores = scores.reshape(rows, kv_heads, -1, width, num_cells)
        scores = mx.minimum(scores, _bound(mask, cache.placement)[:, :, None])
        scores = scores.reshape(*folded, num_cells)
    weights = mx.power(_TWO, scores - scores.max(axis=-1, keepdims=True))
    out = (weights @ values) / weights.sum(axis=-1, keepdims=True)
    return out.reshape(rows, num_heads, width, -1)


def _is_plain(queries: mx.array, keys: Any, values: Any, mask: Any) -> bool:
    """Float32 throughout, and a mask that only hides, the same for all heads."""
    if any(x.dtype != mx.float32 for x in (queries, keys, values)):
        return False
    return mask is None or (
        isinstance(mask, mx.array) and mask.dtype == mx.bool_ and mask.ndim == 4 and mask.shape[1] == 1
    )


def _bound(mask: mx.array, place: Placement) -> mx.array:
    """What no score may exceed: nothing at all, where its cell is hidden.  [rows, 1, width, cells]"""

    def compute() -> mx.array:
        return mx.where(mask, mx.inf, -mx.inf)

    return place.once(("bound", id(mask)), compute) if place.made(mask) else compute()


class PassRope(nn.RoPE):
    """A rope that takes its sines and cosines from the pass."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """x [rows, heads, width, dim]"""
        place = Placement.at(offset)
        if (
            place is None
            or not isinstance(offset, mx.array)
            or self.traditional
            or x.dtype != mx.float32
            or x.ndim != 4
        ):
            return super().__call__(x, offset)  # type: ignore[arg-type]
        width, dims, half = x.shape[2], self.dims, self.dims // 2
        key = ("angles", width, dims, self.base, self.scale)
        cos, sin = place.once(key, lambda: self._angles(offset, width))
        turning = x if dims == x.shape[-1] else x[..., :dims]
        swapped = mx.concatenate([x[..., half:dims], x[..., :half]], axis=-1)
        turned = turning * cos + swapped * sin
        return turned if turning is x else mx.concatenate([turned, x[..., dims:]], axis=-1)

    def _angles(self, offset: mx.array, width: int) -> tuple[mx.array, mx.array]:
        """Cosines, and sines with their sign, for every element that turns.  [rows, 1, width, dims]"""
        half = self.dims // 2
        frequencies = mx.exp(mx.arange(0, half, dtype=mx.float32) * (-math.log(self.base) / half))
        positions = (mx.arange(width, dtype=mx.float32) + offset[:, None]) * self.scale
        angles = positions[:, None, :, None] * frequencies
        cos, sin = mx.cos(angles), mx.sin(angles)
        return mx.concatenate([cos, cos], axis=-1), mx.concatenate([-sin, sin], axis=-1)
