"""Features of pictures that join the hidden states after the first layers (Qwen3-VL's deepstack).

A layer becomes a subclass of its own class that adds what the pass brings for its level; without pictures in
the pass, and with mlx-lm's own caches, it does what it always did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class _Joined:
    """A decoder layer after which a level of features is added."""

    level: int

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        out: mx.array = super().__call__(x, mask, cache)  # type: ignore[misc]
        added: Sequence[mx.array] = getattr(cache, "added", ())
        return out + added[self.level] if added else out


def use_levels(layers: Sequence[nn.Module], num_levels: int) -> None:
    for level, layer in enumerate(layers[:num_levels]):
        kind = type(layer)
        layer.__class__ = type(kind.__name__, (_Joined, kind), {"__module__": kind.__module__})
        layer.level = level
