"""The recurrent layers of mlx-lm that Outrider can serve, and the subclass that replaces each of them.

A new kind of recurrent layer is a subclass in this package and a line in the table. See
models/layer_swaps.py.
"""

from __future__ import annotations

import mlx.nn as nn

from outrider.models.recurrent import gated_delta, mamba2, short_convolution

_CLASSES: dict[type, type[nn.Module]] = {
    layer.__bases__[-1]: layer  # the last base is mlx-lm's own class
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


def use_row_states(model: nn.Module) -> None:
    """Give every recurrent layer the subclass that has a state for each row."""
    for _, module in model.named_modules():
        if type(module) in _CLASSES:
            module.__class__ = _CLASSES[type(module)]
