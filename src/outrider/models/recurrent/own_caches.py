"""What every adopted layer has in common: over mlx-lm's own caches it is the layer that it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from outrider.cache.recurrent import StateView


class OwnCaches:
    """Comes before mlx-lm's class among the bases. `_rows` computes with a state per row, or with none."""

    _rows: Callable[[mx.array, StateView | None], mx.array]

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if isinstance(cache, ArraysCache):
            out: mx.array = super().__call__(x, mask, cache)  # type: ignore[misc]
            return out
        return self._rows(x, cache)
