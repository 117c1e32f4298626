"""Teaches the recurrent layers of a loaded model to keep a state per row.

`adopt` gives them a subclass of what they are. Parameters stay where they are, and no module of mlx-lm is
changed: with mlx-lm's own caches an adopted layer computes as before. With a StateView, and in a pass without
any cache, it computes without a loop over tokens.
"""

from __future__ import annotations

import mlx.nn as nn

from outrider.models.recurrent import gated_delta, mamba2, short_convolution

_ADOPTED: dict[type, type[nn.Module]] = {
    layer.__bases__[-1]: layer  # mlx-lm's own class
    for layer in (
        gated_delta.Qwen3NextLayer,
        gated_delta.Qwen35Layer,
        gated_delta.OlmoLayer,
        gated_delta.KimiLayer,
        gated_delta.BailingLayer,
        mamba2.NemotronHLayer,
        mamba2.FalconH1Layer,
        mamba2.GraniteLayer,
        mamba2.Mamba2Layer,
        short_convolution.Lfm2Layer,
        short_convolution.Lfm2MoeLayer,
    )
}


def adopt(model: nn.Module) -> None:
    """Give every recurrent layer of a model the class that knows rows."""
    for _, module in model.named_modules():
        if type(module) in _ADOPTED:
            module.__class__ = _ADOPTED[type(module)]
