"""Attention, swiglu and rope for Linux on x86, where MLX's own versions take up to a third of a decode step.

MLX computes `exp` on these CPUs one element at a time. Nanoseconds for each element: `exp` 12, a sigmoid 16,
a masking `where` 4.4, a power of two 4.4 (2.6 for masked cells), a minimum and other arithmetic 0.2. So

    swiglu       silu(x) = x / (1 + 2^(-x log2 e))
    attention    the scale of the queries contains log2 e, and the softmax weights are powers of two;
                 `minimum` with -inf masks cells; all heads that share a key head are one matmul
    rope         a pass computes sines and cosines once for all layers; bit-identical to MLX's rope

These functions handle float32 with Outrider's caches. Everything else goes to mlx-lm's functions.
"""

from __future__ import annotations

import math
import platform
import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations, base

from outrider.cache.placement import RopeOffsets
from outrider.cache.ragged_kv import LayerView
from outrider.cpu.matmul import MAX_TOKENS

_LOG2_E = math.log2(math.e)
_ONE, _TWO, _MINUS_LOG2_E = mx.array(1.0), mx.array(2.0), mx.array(-_LOG2_E)


def applies() -> bool:
    """True on Linux with an x86 CPU as MLX's device. Other CPUs, and GPUs, have a fast `exp`."""
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

    queries [rows, heads, width, dim]; keys, values [rows, kv_heads, cells, dim];
    mask [rows, 1, width, cells]; sinks [heads]
    """
    if not isinstance(cache, LayerView) or not _is_plain(queries, keys, values, mask):
        return base.scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
    rows, num_heads, width, _ = queries.shape
    _, kv_heads, num_cells, _ = keys.shape
    folded = (rows, kv_heads, num_heads // kv_heads * width)
    scores = _products((queries * (scale * _LOG2_E)).reshape(*folded, -1), keys)
    if mask is not None:
        scores = scores.reshape(rows, kv_heads, -1, width, num_cells)
        scores = mx.minimum(scores, cache.placement.score_bound(mask)[:, :, None])
        scores = scores.reshape(*folded, num_cells)
    largest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:  # one more score for each head, without a value
        sinks = mx.repeat(sinks.astype(mx.float32) * _LOG2_E, width).reshape(1, kv_heads, -1, 1)
        largest = mx.maximum(largest, sinks)
    weights = mx.power(_TWO, scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + mx.power(_TWO, sinks - largest)
    return ((weights @ values) / total).reshape(rows, num_heads, width, -1)


def _products(queries: mx.array, keys: mx.array) -> mx.array:
    """queries @ keys^T in parts that cpu/matmul.py computes, so that a query's scores are the same to the bit
    in every pass. A quantised layer that follows would make a visible difference of a last bit."""
    num_queries = queries.shape[2]
    parts = [
        queries[:, :, first : first + MAX_TOKENS] @ keys.swapaxes(2, 3)
        for first in range(0, num_queries, MAX_TOKENS)
    ]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def _is_plain(queries: mx.array, keys: Any, values: Any, mask: Any) -> bool:
    """True if all arrays are float32 and the mask is boolean and the same for all heads, or absent."""
    if any(x.dtype != mx.float32 for x in (queries, keys, values)):
        return False
    return mask is None or (
        isinstance(mask, mx.array) and mask.dtype == mx.bool_ and mask.ndim == 4 and mask.shape[1] == 1
    )


class SharedAnglesRope(nn.RoPE):
    """A rope that takes its sines and cosines from the pass, where all layers share them."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """x [rows, heads, width, dim]"""
        if (
            not isinstance(offset, RopeOffsets)  # mlx-lm's caches: an offset that may change in place
            or self.traditional
            or x.dtype != mx.float32
            or x.ndim != 4
        ):
            return super().__call__(x, offset)  # type: ignore[arg-type]
        width, dims, half = x.shape[2], self.dims, self.dims // 2
        key = (width, dims, self.base, self.scale)
        if key not in offset.angles:
            offset.angles[key] = self._angles(offset, width)
        cos, sin = offset.angles[key]
        rotated = x if dims == x.shape[-1] else x[..., :dims]
        swapped = mx.concatenate([x[..., half:dims], x[..., :half]], axis=-1)
        out = rotated * cos + swapped * sin
        return out if rotated is x else mx.concatenate([out, x[..., dims:]], axis=-1)

    def _angles(self, offset: mx.array, width: int) -> tuple[mx.array, mx.array]:
        """Cosines, and sines with their sign, for every rotated element.  [rows, 1, width, dims]"""
        half = self.dims // 2
        frequencies = mx.exp(mx.arange(0, half, dtype=mx.float32) * (-math.log(self.base) / half))
        positions = (mx.arange(width, dtype=mx.float32) + offset[:, None]) * self.scale
        angles = positions[:, None, :, None] * frequencies
        cos, sin = mx.cos(angles), mx.sin(angles)
        return mx.concatenate([cos, cos], axis=-1), mx.concatenate([-sin, sin], axis=-1)
