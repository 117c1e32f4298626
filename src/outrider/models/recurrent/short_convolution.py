"""mlx-lm's LFM2 layers with a window per row."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import lfm2, lfm2_moe
from mlx_lm.models.cache import ArraysCache

from outrider.models.recurrent.convolution import causal_convolution


class _ShortConvolution:
    """LFM2's gated convolution: no state but its window."""

    def __call__(self: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if isinstance(cache, ArraysCache):
            out: mx.array = super().__call__(x, mask, cache)  # type: ignore[misc]
            return out
        before, after, x = mx.split(self.in_proj(x), 3, axis=-1)
        out = self.out_proj(after * causal_convolution(self.conv, before * x, cache, 0))
        return out


class Lfm2Layer(_ShortConvolution, lfm2.ShortConv):
    pass


class Lfm2MoeLayer(_ShortConvolution, lfm2_moe.ShortConv):
    pass
