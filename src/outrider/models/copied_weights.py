"""Counts the dequantised weights that a wide pass holds at once. For CUDA.

A wide pass over prompts multiplies by dequantised copies of its weights (models/quantized_layers.py), which
live until the device has used them. Here such a pass is built and not computed: each layer reports its copy,
and each layer that writes cells or a state reports that the pass may be launched up to there. So layers that
are merged, called twice or not dequantised count as in a real pass, and so do layers after which nothing is
launched. How many launches are held at once follows from the rules of cache/placement.py.

The output projection is not counted: it is called with few tokens, also for `prompt_logprobs`.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from outrider.cache.placement import Placement, most_held
from outrider.models import quantized_layers
from outrider.models.draft_model import DraftModel
from outrider.models.heads import LoadedHead
from outrider.models.quantized_layers import reported_copies
from outrider.models.trunk import Trunk, TrunkCache
from outrider.plan import MANY_TOKENS


def copied_bytes(trunk: Trunk, drafter: LoadedHead | DraftModel | None = None) -> int:
    """The most bytes of copies that a wide pass of the trunk, with its drafter, holds at once.

    On several ranks: of this rank. Call it when the layers are those that serve.
    """
    return most_copied_bytes(trunk, drafter) if quantized_layers.applies() else 0


def most_copied_bytes(trunk: Trunk, drafter: LoadedHead | DraftModel | None) -> int:
    """The same for any device on which layers were swapped as on CUDA."""
    by_layer = _copies_by_layer(trunk)
    if isinstance(drafter, DraftModel):
        by_layer[-1] += sum(_copies_by_layer(drafter.trunk))  # its passes launch nothing
    elif drafter is not None:
        by_layer[-1] += _copies_of_head(drafter, trunk)
    return most_held(by_layer)


def _copies_by_layer(trunk: Trunk) -> list[int]:
    """Bytes between two layers that write cells or a state; the last entry: after the last of them."""
    cache, place = TrunkCache(trunk.layout), _CountingPlacement()
    for buffers in cache.buffers():
        buffers.resize(1, MANY_TOKENS)
    with reported_copies(place.add):
        trunk.hidden(mx.zeros((1, MANY_TOKENS), mx.int32), cache, place)
    cache.commit(place.num_fed)
    return place.by_layer


def _copies_of_head(head: LoadedHead, trunk: Trunk) -> int:
    """All layers of a head are fed the whole chunk, one for each depth, and launch nothing."""
    copies: list[int] = []
    states = mx.zeros((1, MANY_TOKENS, trunk.hidden_size), trunk.dtype)
    with reported_copies(copies.append):
        for layer in head.layers:
            layer(states, states, layer.new_cache())
    return sum(copies)


class _CountingPlacement(Placement):
    """The place of a wide pass over one new row that is not computed."""

    is_wide: Any = True

    def __init__(self) -> None:
        starts, num_fed = mx.array([0]), mx.array([MANY_TOKENS])
        super().__init__([0], starts, num_fed, MANY_TOKENS, MANY_TOKENS, MANY_TOKENS, commits_all=True)
        self.by_layer = [0]

    def add(self, num_bytes: int) -> None:
        self.by_layer[-1] += num_bytes

    def launch_every_few_layers(self, *arrays: mx.array) -> None:
        self.by_layer.append(0)
