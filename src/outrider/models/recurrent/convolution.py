"""Causal convolutions over a row's last few tokens, with a conv state for each row."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from outrider.cache.recurrent import StateView


def causal_convolution(conv: nn.Conv1d, inputs: mx.array, view: StateView | None, part: int) -> mx.array:
    """[rows, width, channels] -> the same shape. The conv state is part `part` of the view."""
    num_past = conv.weight.shape[1] - 1
    rows, _, channels = inputs.shape
    past = mx.zeros((rows, num_past, channels), inputs.dtype) if view is None else view[part]
    window = mx.concatenate([past, inputs], axis=1)
    if view is not None:
        # After n committed tokens the last `num_past` inputs are columns n .. n + num_past - 1.
        view.on_commit(part, lambda counts: mx.take_along_axis(window, counts.columns(num_past), axis=1))
    return conv(window)
