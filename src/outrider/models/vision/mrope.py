"""Rope with three positions a token (time, row, column), for the prompts that hold pictures.

A family says which of the three each frequency turns by. Where all three are equal, as in text and in
everything after a picture, this is plain rope: so a text row, and a media row once it decodes, take the
model's own path, and only passes over prompts with pictures come here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from outrider.cache.ragged_kv import GridPositions

Layout = Literal["chunked", "interleaved"]


class SectionedRope(nn.Module):
    """Stands in for a layer's rope: plain offsets go to the model's own, grids are turned here."""

    def __init__(self, plain: nn.RoPE, sections: Sequence[int], layout: Layout) -> None:
        super().__init__()
        self.plain = plain
        self.sections, self.layout = list(sections), layout
        axes = frequency_axes(sections, plain.dims // 2, layout)
        self._axes = mx.array(axes)
        exponents = mx.arange(0, plain.dims // 2, dtype=mx.float32) * (
            -np.log(plain.base) / (plain.dims // 2)
        )
        self._frequencies = mx.exp(exponents) * plain.scale
        mx.eval(self._axes, self._frequencies)

    def __call__(self, x: mx.array, offset: int | mx.array | GridPositions = 0) -> mx.array:
        """x [rows, heads, width, dim]"""
        if not isinstance(offset, GridPositions):
            return self.plain(x, offset=offset)  # type: ignore[arg-type]
        half = self.plain.dims // 2
        chosen = mx.take(offset.grid, self._axes, axis=0).transpose(1, 2, 0)  # [rows, width, half]
        angles = (chosen.astype(mx.float32) * self._frequencies)[:, None]
        cos, sin = mx.cos(angles).astype(x.dtype), mx.sin(angles).astype(x.dtype)
        first, second = x[..., :half], x[..., half : 2 * half]
        turned = [first * cos - second * sin, first * sin + second * cos]
        return mx.concatenate([*turned, x[..., 2 * half :]], axis=-1)


def frequency_axes(sections: Sequence[int], num_frequencies: int, layout: Layout) -> list[int]:
    """Which axis (0 time, 1 row, 2 column) each frequency turns by."""
    if layout == "chunked":
        axes = [axis for axis, size in enumerate(sections) for _ in range(size)]
        return (axes + [0] * num_frequencies)[:num_frequencies]
    return [axis if (axis := i % 3) and i < 3 * sections[axis] else 0 for i in range(num_frequencies)]


def use_sections(stack: nn.Module, sections: Sequence[int], layout: Layout) -> None:
    """Give every attention layer of a stack a rope that knows grids."""
    for _, module in stack.named_modules():
        if isinstance(getattr(module, "rope", None), nn.RoPE):
            module.rope = SectionedRope(module.rope, sections, layout)


def share_sections(stack: nn.Module, head: nn.Module) -> None:
    """Give a head the kind of rope that its trunk has."""
    rope = next((part for part in stack.modules() if isinstance(part, SectionedRope)), None)
    if rope is not None:
        use_sections(head, rope.sections, rope.layout)
