"""Image features that are added to the hidden states after the first layers (Qwen3-VL's deepstack).

A decoder layer becomes a subclass of its class that adds the features of its level. The features come with
the pass (`Placement.deepstack`). Without images in the pass, and with mlx-lm's own caches, the layer computes
as mlx-lm's class does. See models/layer_swaps.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from outrider.cache.ragged_kv import LayerView


class _DeepstackLayer:
    level: int

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        out: mx.array = super().__call__(x, mask, cache)  # type: ignore[misc]
        features = cache.placement.deepstack if isinstance(cache, LayerView) else ()
        return out + features[self.level] if features else out


def use_deepstack(layers: Sequence[nn.Module], num_levels: int) -> None:
    for level, layer in enumerate(layers[:num_levels]):
        kind = type(layer)
        layer.__class__ = type(kind.__name__, (_DeepstackLayer, kind), {"__module__": kind.__module__})
        layer.level = level
