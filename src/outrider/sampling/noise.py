"""Gumbel noise as a pure function of (seed, position, token id): the coupling between drafts and targets.

A hash of integers, not a generator's stream: whoever asks for a token's noise, for the whole vocabulary or
for a handful of ids, on whatever path, gets the same number.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np


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


def _mix(x: mx.array) -> mx.array:
    """A bijection of 32-bit words in which every input bit moves about half of the output bits."""
    x = x ^ (x >> 16)
    x = x * _constant(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * _constant(0x846CA68B)
    return x ^ (x >> 16)


@mx.compile
def _noise(first: mx.array, second: mx.array, token_ids: mx.array) -> mx.array:
    """-log(-log(1 - u)): high noise, the kind that wins, comes from small u, where float32 is dense."""
    bits = _mix(_mix(token_ids + first) ^ second)
    u = (bits.astype(mx.float32) + 0.5) * (1 / 2**32)
    u = mx.minimum(u, 1 - 2**-24)  # the conversion rounds up to 1; both ends are excluded
    series = u * (1 + u * (1 / 2 + u * (1 / 3)))  # of -log(1 - u), where 1 - u would round the small u away
    return -mx.log(mx.where(u < 2**-6, series, -mx.log(1 - u)))
