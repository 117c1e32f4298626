"""The base of all swapped recurrent layers: with mlx-lm's own caches they compute as mlx-lm's classes do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from outrider.cache.recurrent import StateView


class RowStateLayer:
    """Stands before mlx-lm's class among the bases.

    `_forward_rows` computes with a state for each row. In a pass without a cache (None) all states are zero.
    """

    _forward_rows: Callable[[mx.array, StateView | None], mx.array]

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if isinstance(cache, ArraysCache):
            out: mx.array = super().__call__(x, mask, cache)  # type: ignore[misc]
            return out
        return self._forward_rows(x, cache)
