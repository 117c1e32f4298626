"""Attention layers on GPUs for rows that keep their cells by blocks.

Decode passes read the blocks where they are (models/attention_kernels.py). Wider passes copy the blocks of
their rows together and use MLX's own attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

from outrider import function_swaps, gpu_kernels
from outrider.cache.cell_format import BFLOAT16_BITS
from outrider.cache.placement import Placement
from outrider.cache.ragged_kv import LayerView
from outrider.models import attention_kernels
from outrider.models.attention_kernels import TOLERANCE
from outrider.plan import BLOCK_SIZE

MAX_WIDTH = 16  # tokens of a row. For more of them MLX's attention over copied cells is faster


def use_paged_attention(model: nn.Module) -> None:
    """Swap the layers of a model that call mlx-lm's attention; layers that are swapped already stay."""
    for _, module in model.named_modules():
        kind: type[nn.Module] = type(module)
        module.__class__ = function_swaps.with_functions(kind, _FUNCTIONS)


def plain_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that a layer had before `use_paged_attention`."""
    return kind.__bases__[0] if function_swaps.is_swapped(kind) else kind


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's scaled_dot_product_attention, for layers of a model that is served on a GPU.

    queries [rows, heads, width, dim]; keys, values: what the cache's `update_and_fetch` has given
    """
    view = cache[0] if isinstance(cache, Sequence) else cache
    if isinstance(view, LayerView) and view.placement.has_blocks:
        window = view.window_of(keys, values, mask)
        if window is not None and _fits(queries, view):
            view.placement.num_native += 1
            return attention_kernels.attend(
                queries, view.arrays(), view.spec, view.placement, scale, window, sinks
            )
        if groups := view.groups(keys, values, mask):  # prompts of different lengths: each group its own
            order = mx.argsort(mx.concatenate([own for own, _, _ in groups]))
            parts = [
                _by_mlx(queries[own], *group.read(), group, scale, own_mask, sinks)
                for own, group, own_mask in groups
            ]
            return mx.concatenate(parts)[order]
    return _by_mlx(queries, keys, values, cache, scale, mask, sinks)


def _by_mlx(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
) -> mx.array:
    """mlx-lm's function. On CUDA MLX would turn a mask of booleans into numbers: in every layer, and for each
    head anew."""
    view = cache[0] if isinstance(cache, Sequence) else cache
    if isinstance(view, LayerView) and isinstance(mask, mx.array) and takes_numbers(queries.dtype):
        added = view.placement.added_to_scores(mask, queries.dtype)
        mask = mask if added is None else added
    return base.scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks=sinks)


@cache
def takes_numbers(dtype: mx.Dtype) -> bool:
    """True if MLX's attention gives the same for a mask of numbers, which all heads share."""
    return (
        mx.cuda.is_available()
        and gpu_kernels.is_available()
        and gpu_kernels.is_close(lambda: _error_of_numbers(dtype), "masked-attention", TOLERANCE[dtype])
    )


def _error_of_numbers(dtype: mx.Dtype) -> float:
    """Heads of 64 and 256: MLX has two ways."""
    place = Placement([0, 1], mx.array([40, 3]), mx.array([9, 9]), 9, 49, 64)
    mask, errors = place.mask(None), []
    added = place.added_to_scores(mask, dtype)
    for dim in (64, 256):
        queries, keys, values = (
            mx.random.normal((2, heads, num, dim), key=key).astype(dtype)
            for heads, num, key in zip(
                (6, 2, 2), (9, *[place.num_attended] * 2), mx.random.split(mx.random.key(2), 3), strict=True
            )
        )
        both = [
            mx.fast.scaled_dot_product_attention(queries, keys, values, scale=dim**-0.5, mask=one)
            for one in (mask, added)
        ]
        errors.append(mx.abs(both[0].astype(mx.float32) - both[1].astype(mx.float32)).max())
    return float(mx.stack(errors).max())


def _fits(queries: mx.array, view: LayerView) -> bool:
    num_heads, width, dim = queries.shape[1:]
    spec = view.spec
    return (
        width <= MAX_WIDTH
        and spec.bits != BFLOAT16_BITS  # beside a model in float32: no kernel reads them
        and dim in (attention_kernels.DIMS if spec.bits is None else attention_kernels.QUANTIZED_DIMS)
        and dim == spec.key_dim == spec.value_dim
        and view.keys.shape[2] == BLOCK_SIZE
        and num_heads % spec.num_heads == 0
        and spec.dtype in attention_kernels.TOLERANCE
        and attention_kernels.agrees(dim, spec.dtype, spec.bits)
    )


_FUNCTIONS = ((base.scaled_dot_product_attention, attention),)
