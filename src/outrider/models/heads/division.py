"""A head that is divided among ranks: each has some rows of `fc`, and its part of the decoder block.

    fc                      by outputs; the outputs of all ranks are gathered: the same bits as a whole one
    attention, MLP          as the trunk's family divides its layers; the outputs are summed (rank_sums.py)
    norms                   whole
    draft projection        by tokens of the draft vocabulary; the logits are gathered

A block that is not one of the trunk's layers (LongCat-Flash), and one that the ranks do not divide evenly,
cannot be divided. (mlx-lm cannot divide the trunks of MiMo, ERNIE, Nemotron-H and Qwen3-Next.)
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from outrider.cpu.quantized import is_kept, new_linear
from outrider.models.divided_output import GatheredLinear, linear_of_rows, rows_of_rank, take_rows
from outrider.models.families import UnsupportedModel
from outrider.models.heads.draft_projection import draft_projection
from outrider.models.heads.errors import HeadError
from outrider.models.heads.module import MTPHead
from outrider.models.sharding import shard_layer
from outrider.models.trunk import Trunk


class HeadNotDivisible(HeadError):
    """The head has to be whole."""


def divide(layers: Sequence[MTPHead], trunk: Trunk, group: mx.distributed.Group) -> None:
    """Keep this rank's part of each depth. Call it before the weights' dtype is settled.

    Raises HeadNotDivisible. The layers cannot be used then.
    """
    family = type(trunk.network).__module__.rpartition(".")[2]
    for layer in layers:
        try:
            shard_layer(layer.layers[0], trunk.network, group, family)
        except UnsupportedModel as error:
            raise HeadNotDivisible(f"the MTP head cannot be divided: {error.reason}") from error
        num_outputs = layer.fc["weight"].shape[0]
        own = _copied(linear_of_rows(layer.fc, rows_of_rank(num_outputs, group)))
        layer.fc = GatheredLinear(own, num_outputs, group)


def divided_draft_projection(
    trunk: Trunk, draft_ids: mx.array, group: mx.distributed.Group
) -> GatheredLinear:
    """The rows of the output projection for these tokens, divided. All ranks call it at the same time.

    Rank 0 sends the rows to the others, which have only a part of an output projection of its own.
    """
    num_ids, is_tied = draft_ids.size, "lm_head" not in trunk.model
    has_rows = is_tied or group.rank() == 0
    rows = draft_projection(trunk, draft_ids if has_rows else mx.zeros_like(draft_ids))
    if not is_tied:
        rows = _of_rank_0(rows, num_ids, group)
    return GatheredLinear(_copied(linear_of_rows(rows, rows_of_rank(num_ids, group))), num_ids, group)


def _copied(own: nn.Module) -> nn.Module:
    """The layer with arrays of its own: a part of an array holds the whole one's memory."""
    own.update(tree_map(mx.contiguous, own.parameters()))
    mx.eval(own.parameters())
    return own


def _of_rank_0(rows: nn.Module, num_rows: int, group: mx.distributed.Group) -> nn.Module:
    """The layer with rank 0's weights, which have the same formats and shapes."""
    arrays = take_rows(rows, slice(0, num_rows))
    for name in sorted(arrays):
        own = arrays[name] if group.rank() == 0 else mx.zeros_like(arrays[name])
        arrays[name] = mx.distributed.all_sum(own, group=group)
        mx.eval(arrays[name])
    if is_kept(rows):
        return new_linear(arrays, rows.group_size, rows.bits, rows.mode)
    rows.weight = arrays["weight"]
    return rows
