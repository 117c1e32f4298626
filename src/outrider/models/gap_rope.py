"""Rope for prompts of which tokens were skipped: each token has a position of its own.

    prompt      a  b  c  d  e  f  g  h          the scorer keeps a b, e, h
    cells       a  b  e  h                      dense: attention and its masks go by cells
    positions   0  1  4  7                      what rope turns by

mlx-lm's ropes take one offset for each row, and count up from there. A token with a position of its own is
therefore a row of its own to the rope. Only passes over such prompts bring GridPositions. See
models/layer_swaps.py.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from outrider.cache.placement import GridPositions
from outrider.models.vision.mrope import MRope


class GapRope(nn.Module):
    """Replaces a layer's rope: plain offsets go to the model's own rope, GridPositions token by token."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.plain = plain

    def __call__(self, x: mx.array, offset: int | mx.array | GridPositions = 0) -> mx.array:
        """x [rows, heads, width, dim]"""
        if not isinstance(offset, GridPositions):
            return self.plain(x, offset=offset)
        rows, num_heads, width, dim = x.shape
        by_token = x.transpose(0, 2, 1, 3).reshape(rows * width, num_heads, 1, dim)
        turned = self.plain(by_token, offset=offset.grid[0].flatten())
        return turned.reshape(rows, width, num_heads, dim).transpose(0, 2, 1, 3)


def use_gap_ropes(model: nn.Module) -> None:
    """Give every attention layer of a model a rope that accepts GridPositions."""
    for _, module in model.named_modules():
        rope = getattr(module, "rope", None)
        if isinstance(rope, nn.Module) and not isinstance(rope, MRope | GapRope):
            module.rope = GapRope(rope)
