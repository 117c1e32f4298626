"""Multimodal rope (mrope): three positions for each token (time, row, column), for prompts with images.

Each rope frequency uses one of the three positions. Where all three are equal, as in text and
in everything after an image, mrope is plain rope. So text rows, and rows with images once they decode, use
the model's own rope. Only passes over prompts with images bring GridPositions. See models/layer_swaps.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from outrider.cache.placement import GridPositions


@dataclass(frozen=True)
class MRopeSections:
    """How a family distributes its rope frequencies over time, row and column."""

    sizes: tuple[int, ...]  # config.json's mrope_section
    layout: Literal["chunked", "interleaved"]

    def axes(self, num_frequencies: int) -> list[int]:
        """The axis that each frequency uses: 0 time, 1 row, 2 column."""
        if self.layout == "chunked":
            axes = [axis for axis, size in enumerate(self.sizes) for _ in range(size)]
            return (axes + [0] * num_frequencies)[:num_frequencies]
        return [axis if (axis := i % 3) and i < 3 * self.sizes[axis] else 0 for i in range(num_frequencies)]


class MRope(nn.Module):
    """Replaces a layer's rope: plain offsets go to the model's own rope, GridPositions are computed here."""

    def __init__(self, plain: nn.RoPE, sections: MRopeSections) -> None:
        super().__init__()
        self.plain = plain
        half = plain.dims // 2
        self._axes = mx.array(sections.axes(half))
        exponents = mx.arange(0, half, dtype=mx.float32) * (-np.log(plain.base) / half)
        self._frequencies = mx.exp(exponents) * plain.scale
        mx.eval(self._axes, self._frequencies)

    def __call__(self, x: mx.array, offset: int | mx.array | GridPositions = 0) -> mx.array:
        """x [rows, heads, width, dim]"""
        if not isinstance(offset, GridPositions):
            return self.plain(x, offset=offset)  # type: ignore[arg-type]
        half = self.plain.dims // 2
        positions = mx.take(offset.grid, self._axes, axis=0).transpose(1, 2, 0)  # [rows, width, half]
        angles = (positions.astype(mx.float32) * self._frequencies)[:, None]
        cos, sin = mx.cos(angles).astype(x.dtype), mx.sin(angles).astype(x.dtype)
        first, second = x[..., :half], x[..., half : 2 * half]
        rotated = [first * cos - second * sin, first * sin + second * cos]
        return mx.concatenate([*rotated, x[..., 2 * half :]], axis=-1)


def use_mrope(model: nn.Module, sections: MRopeSections) -> None:
    """Give every attention layer of a model a rope that accepts GridPositions."""
    for _, module in model.named_modules():
        if isinstance(getattr(module, "rope", None), nn.RoPE):
            module.rope = MRope(module.rope, sections)
