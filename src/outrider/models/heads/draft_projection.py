"""The output projection of a head that drafts from a reduced vocabulary: rows of the trunk's."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from outrider.cpu.quantized import is_kept, linear_rows
from outrider.models.trunk import Trunk

DRAFT_BITS = 4  # most bits of the weights that project drafts onto a reduced vocabulary


def draft_projection(trunk: Trunk, token_ids: mx.array) -> nn.Module:
    """A linear layer with the rows of the output projection for these tokens."""
    output = trunk.output
    if is_kept(output):
        rows: nn.Module = linear_rows(output, token_ids, DRAFT_BITS)
    else:
        rows = nn.Linear(1, 1, bias=False)  # its weight is replaced
        rows.weight = _dequantized_rows(output, token_ids) if "scales" in output else output.weight[token_ids]
    mx.eval(rows.parameters())
    return rows


def _dequantized_rows(layer: nn.Module, rows: mx.array) -> mx.array:
    biases = layer.get("biases")
    return mx.dequantize(
        layer.weight[rows],
        layer.scales[rows],
        None if biases is None else biases[rows],
        layer.group_size,
        layer.bits,
        layer.mode,
    )
