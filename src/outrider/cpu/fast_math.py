"""Attention, swiglu and rope for Linux on x86, where MLX's own versions take up to a third of a decode step.

MLX computes `exp` on these CPUs one element at a time. Nanoseconds for each element: `exp` 12, a sigmoid 16,
a masking `where` 4.4, a power of two 4.4 (2.6 for masked cells), a minimum and other arithmetic 0.2. So

    swiglu       silu(x) = x / (1 + 2^(-x log2 e))
    attention    the scale of the queries contains log2 e, and the softmax weights are powers of two;
                 `minimum` with -inf masks cells; all heads that share a key head are one matmul
                 or, with quantised layers or cells, one native primitive (cell_operations.h);
                 latent attention is computed in one form (cpu/latent_attention.py)
    rope         a pass computes sines and cosines once for all layers; bit-identical to MLX's rope

These functions handle float32 with Outrider's caches. Everything else goes to mlx-lm's functions.
"""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations, base

from outrider.cache.placement import RopeOffsets
from outrider.cache.ragged_kv import LayerView
from outrider.cpu import extension
from outrider.cpu.latent_attention import Cells
from outrider.cpu.matmul import MAX_TOKENS
from outrider.plan import BLOCK_SIZE

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

    queries [rows, heads, width, dim]; keys, values [rows, kv_heads, cells, dim]; sinks [heads];
    mask [rows, 1, width, cells] bool, or [rows, heads, width, cells] to be added to the scores
    """
    if isinstance(keys, Cells):
        cells = values.latents if isinstance(values, Cells) else values
        out = attention(keys.layer(queries), keys.latents, cells, cache, scale, mask, sinks)
        return values.layer(out) if isinstance(values, Cells) else out
    view = _layer_view(cache)
    if view is None or not _is_plain(queries, keys, values, mask):
        return base.scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
    if sinks is None and (native := _native_attention(queries, keys, values, view, scale, mask)) is not None:
        return native
    if groups := view.groups(keys, values, mask):  # long and short rows: each group reads its own cells only
        order = mx.argsort(mx.concatenate([own for own, _, _ in groups]))
        parts = []
        for own, group, own_mask in groups:
            own_keys, own_values = group.read()
            parts.append(attention(queries[own], own_keys, own_values, group, scale, own_mask, sinks))
        return mx.concatenate(parts)[order]
    rows, num_heads, width, _ = queries.shape
    _, kv_heads, num_cells, _ = keys.shape
    folded = (rows, kv_heads, num_heads // kv_heads * width)
    scores = _products((queries * (scale * _LOG2_E)).reshape(*folded, -1), keys)
    if mask is not None and mask.dtype == mx.float32:
        scores = scores + (mask * _LOG2_E).reshape(*folded, num_cells)
    elif mask is not None:
        scores = scores.reshape(rows, kv_heads, -1, width, num_cells)
        scores = mx.minimum(scores, view.placement.score_bound(mask)[:, :, None])
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


def _native_attention(
    queries: mx.array, keys: mx.array, values: mx.array, cache: LayerView, scale: float, mask: Any
) -> mx.array | None:
    """Attention that reads each row's cells where they are. None if it cannot, or if nothing is compiled.

    The extension is compiled for quantised layers or cells only: other models use MLX's operations.
    """
    window = cache.window_of(keys, values, mask)
    if window is None or not cache.attends_natively(lambda: extension.if_loaded() is not None):
        return None
    if not _has_native_shape(queries, cache):
        return None
    native, place = extension.loaded(), cache.placement
    place.num_native += 1
    by_token = mx.contiguous(queries.transpose(0, 2, 1, 3))
    cells = cache.arrays(), place.starts, place.num_fed, place.places
    return native.attend_cells(by_token, *cells, place.has_blocks, window, scale).transpose(0, 2, 1, 3)


def _has_native_shape(queries: mx.array, cache: LayerView) -> bool:
    spec, dim = cache.spec, queries.shape[3]
    if cache.placement.has_blocks and cache.keys.shape[2] != BLOCK_SIZE:
        return False
    return dim % 16 == 0 and dim == spec.key_dim == spec.value_dim and queries.shape[1] % spec.num_heads == 0


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
    """True if all arrays are float32, and the mask is boolean and the same for all heads, float32 and one
    for each head, or absent."""
    if any(x.dtype != mx.float32 for x in (queries, keys, values)):
        return False
    if mask is None:
        return True
    if not isinstance(mask, mx.array) or mask.ndim != 4:
        return False
    return (mask.dtype == mx.bool_ and mask.shape[1] == 1) or (
        mask.dtype == mx.float32 and mask.shape == (*queries.shape[:3], keys.shape[2])
    )


def _layer_view(cache: Any) -> LayerView | None:
    """Outrider's cache of a layer, None for other caches. Of several caches attention has the first."""
    first = cache[0] if isinstance(cache, Sequence) else cache
    return first if isinstance(first, LayerView) else None


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
