"""Gumbel noise as a pure function of (seed, position, token id): the coupling between drafts and targets.

A hash of integers, not a generator's stream: whoever asks for a token's noise, for the whole vocabulary or
for a handful of ids, on whatever path, gets the same number.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

BELOW_ONE = 2**-32 * (1 - 2**-24)  # times any 32-bit word


def seed_words(seeds: Sequence[int]) -> mx.array:
    """The seeds as two 32-bit words each.  [rows, 2]"""
    wide = np.array([seed % 2**64 for seed in seeds], np.uint64)
    return mx.array(np.stack([wide & np.uint64(0xFFFFFFFF), wide >> np.uint64(32)], axis=1).astype(np.uint32))


def gumbel(seeds: mx.array, positions: mx.array, token_ids: mx.array) -> mx.array:
    """Standard Gumbel noise for each (row, position, token).

    seeds [rows, 2], positions [rows, n], token_ids broadcastable to [rows, n, tokens] -> [rows, n, tokens]
    """
    position = positions.astype(mx.uint32)
    first = _mix(seeds[:, :1] + _mix(position + _constant(0x9E3779B9)))
    second = _mix(seeds[:, 1:] ^ _mix(first + _constant(0x85EBCA6B)))
    return _noise(first[..., None], second[..., None], token_ids.astype(mx.uint32))


def _constant(value: int) -> mx.array:
    return mx.array(value, mx.uint32)


def _mix(x: mx.array, key: mx.array | None = None) -> mx.array:
    """A bijection of 32-bit words in which every input bit moves about half of the output bits.

    Another one for each key: it comes in half-way, so that keys give more than the same words shifted.
    """
    x = x ^ (x >> 16)
    x = x * _constant(0x7FEB352D)
    x = x if key is None else x ^ key
    x = x ^ (x >> 15)
    x = x * _constant(0x846CA68B)
    return x ^ (x >> 16)


@mx.compile
def _noise(first: mx.array, second: mx.array, token_ids: mx.array) -> mx.array:
    """-log(-log(1 - u)): high noise, the kind that wins, comes from small u, where float32 is dense.

    1 - u rounds those away. So its logarithm is scaled by u over what was left of it.
    """
    u = (_mix(token_ids + first, second).astype(mx.float32) + 0.5) * BELOW_ONE
    rest = mx.minimum(1 - u, 1 - 2**-24)
    return -mx.log(mx.log(rest) * (u / (rest - 1)))
