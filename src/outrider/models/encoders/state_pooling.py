"""From the states of an input's tokens to one vector, by sentence-transformers' pooling modes."""

from __future__ import annotations

import math

import mlx.core as mx


def pool(states: mx.array, mode: str) -> mx.array:
    """[inputs, tokens, hidden] -> [inputs, hidden]. All inputs have all tokens: there is no padding."""
    length = states.shape[1]
    match mode:
        case "cls":
            return states[:, 0]
        case "lasttoken":
            return states[:, -1]
        case "max":
            return states.max(axis=1)
        case "mean":
            return states.sum(axis=1) / length
        case "mean_sqrt_len_tokens":
            return states.sum(axis=1) / math.sqrt(length)
        case "weightedmean":
            weights = mx.arange(1, length + 1, dtype=mx.float32)[:, None]
            return (states * weights).sum(axis=1) / (length * (length + 1) / 2)
        case _:
            raise ValueError(f"unknown pooling mode {mode!r}")
