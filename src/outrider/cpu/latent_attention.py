"""Latent attention (DeepSeek's MLA) in one form for passes of any width. See cpu/layers.py.

The cells of such a layer hold one short vector each, the latent, of which keys and values of all heads are
linear functions (`embed_q`, `unembed_out`). mlx-lm computes attention in two forms, whose sums differ:

    a single token   queries are taken to the latents (embed_q), attention is over the latents themselves, and
                     its result is taken back (unembed_out)
    more tokens      keys and values of all cells are computed from the latents

A token's result would depend on the width of its pass. Here all passes have the first form: the layers below
do not compute keys and values of cells, but hand the latents on to `attention` (cpu/fast_math.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mistral4 import Mistral4Attention
from mlx_lm.models.mla import MultiLinear

from outrider.cpu.quantized import CpuQuantizedMultiLinear


@dataclass(frozen=True, slots=True)
class Cells:
    """Stands for what `layer` would make of the latents of all cells."""

    layer: nn.Module
    latents: mx.array  # [rows, 1, cells, latent size]


class LatentLinear(MultiLinear):
    """`embed_q` and `unembed_out`: a linear layer for each head."""

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array | Cells:
        return Cells(self, x) if _is_cells(self, x, transpose) else super().__call__(x)


class LatentQuantizedLinear(CpuQuantizedMultiLinear):
    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array | Cells:  # type: ignore[override]
        return Cells(self, x) if _is_cells(self, x, transpose) else super().__call__(x)


CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    MultiLinear: LatentLinear,
    CpuQuantizedMultiLinear: LatentQuantizedLinear,
}


def latent_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that can be given a class of CLASSES."""
    return [
        layer
        for _, module in model.named_modules()
        if "embed_q" in module and "unembed_out" in module
        # Its keys of more tokens are joined with others, outside of `attention`.
        if not isinstance(module, Mistral4Attention)
        for layer in (module.embed_q, module.unembed_out)
        if type(layer) in CLASSES
    ]


def _is_cells(layer: nn.Module, x: mx.array, transpose: bool) -> bool:
    """True for latents, which have one head. Queries and results of attention have all heads."""
    return not transpose or x.shape[1] < layer.weight.shape[0]
