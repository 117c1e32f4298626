"""mlx-lm's LFM2 layers with a conv state for each row."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import lfm2, lfm2_moe

from outrider.cache.recurrent import StateView
from outrider.models.recurrent.convolution import causal_convolution
from outrider.models.recurrent.row_state_layer import RowStateLayer


class _ShortConvolution(RowStateLayer):
    """LFM2's gated convolution: the conv state is its only state."""

    def _forward_rows(self: Any, x: mx.array, view: StateView | None) -> mx.array:
        before, after, x = mx.split(self.in_proj(x), 3, axis=-1)
        out: mx.array = self.out_proj(after * causal_convolution(self.conv, before * x, view, 0))
        return out


class Lfm2Layer(_ShortConvolution, lfm2.ShortConv):
    pass


class Lfm2MoeLayer(_ShortConvolution, lfm2_moe.ShortConv):
    pass
