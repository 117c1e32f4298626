"""Compares operations of the native extension with MLX's own, on small arrays, before it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import mlx.core as mx

TILE_ROWS = 16  # rows that are interleaved
TOLERANCE = 1e-4  # absolute, for results of about 1
FORMATS = (  # bits, group size and mode of the products that are compared
    (4, 32, "affine"),
    (5, 128, "affine"),
    (8, 64, "affine"),
    (4, 32, "mxfp4"),
    (8, 32, "mxfp8"),
    (4, 16, "nvfp4"),
)
DRAWN = [655, 631, 573, 945]  # what sampling/sampler.py draws from the logits of `_draws`, without filters
DRAWN_FILTERED = [936, 945, 869, 416]  # and with them


def wrong_operations(module: ModuleType) -> list[str]:
    """The names of the operations that disagree with MLX's. A TypeError of nanobind passes through."""
    return [name for name, is_correct in _CHECKS.items() if not is_correct(module)]


def _multiplies(weight_format: tuple[int, int, str], module: ModuleType) -> bool:
    """Compare a product with the same one of dequantised weights."""
    bits, group_size, mode = weight_format
    num_tokens, num_rows, size = 9, 150, 1152
    numbers = mx.sin(mx.arange(num_rows * size).astype(mx.float32) * 1.7).reshape(num_rows, size)
    found_parts: Any = mx.quantize(numbers.astype(mx.float16), group_size, bits, mode)
    codes, scales, biases = (*found_parts, None)[:3]
    x = (mx.arange(num_tokens * size) * 5 % 253 - 126).reshape(num_tokens, size).astype(mx.float32)
    x += 0.3 * mx.sin(mx.arange(x.size).astype(mx.float32)).reshape(x.shape)  # both bytes of a token's codes
    x[:, ::32] = 127
    wide: Any = [
        part.astype(mx.float32) if part is not None and part.dtype == mx.float16 else part
        for part in (scales, biases)
    ]
    expected = x @ mx.dequantize(codes, wide[0], wide[1], group_size, bits, mode, dtype=mx.float32).T
    order = group_size, bits, mode
    found = module.quantized_matmul(x, codes, scales, biases, *order)
    experts = mx.zeros(num_tokens, mx.int32)
    of_one = codes[None], scales[None], None if biases is None else biases[None]
    chosen = module.gather_quantized_matmul(x, *of_one, experts, *order)
    is_close = mx.abs(found - expected).max() < 1e-3 * mx.abs(expected).max()
    if not (is_close.item() and mx.array_equal(found, chosen).item()):
        return False
    if bits not in (4, 8) or mode == "mxfp8":
        return True
    tiles = [None if part is None else _interleaved(part) for part in (codes, scales, biases)]
    same = module.quantized_matmul(x, *tiles, *order)
    return bool(mx.array_equal(same, found[:, : same.shape[1]]).item())


def _interleaved(rows: mx.array) -> mx.array:
    """As cpu/quantized.py interleaves them. Rows that fill no tile are left out."""
    return mx.unflatten(rows[: len(rows) // TILE_ROWS * TILE_ROWS], 0, (-1, TILE_ROWS)).swapaxes(1, 2)


def _finds_the_best_two(module: ModuleType) -> bool:
    scores = mx.random.normal((3, 500), key=mx.random.key(0))
    places, margins = module.top_two(scores)
    best, second = (mx.sort(scores, axis=-1)[:, -place] for place in (1, 2))
    return bool(mx.array_equal(places, mx.argmax(scores, axis=-1)).item()) and _is_close(
        margins, best - second
    )


def _draws(module: ModuleType) -> bool:
    """Compare tokens with known ones."""
    logits = 3 * mx.sin(mx.arange(4000).astype(mx.float32) * 1.7).reshape(1, 4, 1000)
    positions, seed, inverse_temperature = (
        mx.arange(9, 13)[None],
        mx.array([[7, 0]], mx.uint32),
        mx.array([2.0]),
    )
    filters = [mx.array([20]), mx.array([0.5]), mx.log(mx.array([0.01]))]
    found = [
        module.sample(logits, positions, inverse_temperature, seed, some, None, False)[0].tolist()
        for some in ([], filters)
    ]
    return found == [[DRAWN], [DRAWN_FILTERED]]


def _writes_cells(module: ModuleType) -> bool:
    """Compare one token's keys and values in bfloat16 with MLX's rounding."""
    buffers = [mx.zeros((4, 1, 8, 32), mx.bfloat16)] * 2
    keys, values = mx.sin(mx.arange(64).astype(mx.float32)).reshape(2, 1, 1, 1, 32)
    where = mx.array([9]), mx.array([1]), mx.array([[2, 3, 0]]), True
    found = module.write_cells(keys, values, buffers, *where)
    return all(
        bool(mx.array_equal(after, before.at[3, 0, 1].add(vector.reshape(-1).astype(mx.bfloat16))))
        for after, before, vector in zip(found, buffers, (keys, values), strict=True)
    )


def _recurs(module: ModuleType) -> bool:
    """Compare the gated delta rule of a few tokens with the same sums in MLX's operations."""
    rows, tokens, heads, dim = 2, 3, 2, 32
    noise = mx.random.split(mx.random.key(1), 6)
    queries, keys, values = (mx.random.normal((rows, tokens, heads, dim), key=key) / 6 for key in noise[:3])
    gates, betas = (mx.random.uniform(0.5, 1, (rows, tokens, heads), key=key) for key in noise[3:5])
    state = mx.random.normal((rows, heads, dim, dim), key=noise[5])
    counts = mx.full((rows,), tokens, mx.int32)
    found = module.recurrence(queries, keys, values, gates[..., None], betas, state, counts, True)
    outputs = []
    for t in range(tokens):
        state = state * gates[:, t, :, None, None]
        deltas = betas[:, t, :, None] * (values[:, t] - (state * keys[:, t, :, None]).sum(-1))
        state = state + deltas[..., None] * keys[:, t, :, None]
        outputs.append((state * queries[:, t, :, None]).sum(-1))
    return _is_close(found[0], mx.stack(outputs, axis=1)) and _is_close(found[1], state)


def _is_close(found: mx.array, expected: mx.array) -> bool:
    return found.shape == expected.shape and bool((mx.abs(found - expected).max() < TOLERANCE).item())


_CHECKS: Mapping[str, Callable[[ModuleType], bool]] = {
    **{
        f"products, {bits} bits {mode}": partial(_multiplies, (bits, size, mode))
        for bits, size, mode in FORMATS
    },
    "the best two scores": _finds_the_best_two,
    "drawn tokens": _draws,
    "written cells": _writes_cells,
    "the delta rule": _recurs,
}
