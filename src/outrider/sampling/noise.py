"""Gumbel noise as a pure function of (seed, position, token id). Drafts and targets use the same.

So a good draft is usually the target, even at a high temperature. The noise is an integer hash, not the
stream of a random generator: a token has the same noise whether it is computed for the whole vocabulary, for
a few candidates or for a reduced draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

BELOW_ONE = 2**-32 * (1 - 2**-24)  # maps every 32-bit word to a float32 below 1


def seed_words(seeds: Sequence[int]) -> mx.array:
    """The seeds as two 32-bit words each.  [rows, 2]"""
    wide = [divmod(seed % 2**64, 2**32) for seed in seeds]
    return mx.array([[low, high] for high, low in wide], mx.uint32)


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
    """A bijection of 32-bit words in which every input bit changes about half of the output bits.

    Each key gives another bijection. The key enters half-way, so that two keys never give shifted copies.
    """
    x = x ^ (x >> 16)
    x = x * _constant(0x7FEB352D)
    x = x if key is None else x ^ key
    x = x ^ (x >> 15)
    x = x * _constant(0x846CA68B)
    return x ^ (x >> 16)


@mx.compile
def _noise(first: mx.array, second: mx.array, token_ids: mx.array) -> mx.array:
    """-log(-log(1 - u)) for uniform u. High noise, the kind that wins, comes from small u.

    float32 is dense near 0, but 1 - u rounds small u away. The factor u / (1 - rest) puts them back.
    """
    u = (_mix(token_ids + first, second).astype(mx.float32) + 0.5) * BELOW_ONE
    rest = mx.minimum(1 - u, 1 - 2**-24)
    return -mx.log(mx.log(rest) * (u / (rest - 1)))
