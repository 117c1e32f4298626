"""The head as a module: the forward pass of one depth, the same for every family.

    x    = fc(concat[norm(embed(x_(t+1))), norm(h_t)])       h_t after the trunk's final norm
    x    = decoder block(x), with a cache of its own
    out  = norm(x);  logits = the trunk's projection(out)     predicts x_(t+2)

Differences between families (order of the concat, the next depth's h) are data: a HeadSpec.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from outrider.cache.ragged_kv import KVSpec, LayerView
from outrider.models.heads.errors import HeadError
from outrider.models.heads.layouts import HeadSpec
from outrider.models.trunk import Trunk, kv_spec

FLOAT32_SUFFIX = "e_score_correction_bias"  # added to scores that every family computes in float32
BlockLayout = KVSpec | tuple[KVSpec, ...]  # what a block stores for a cell: one pair of buffers, or several


class MTPHead(nn.Module):
    """The parameters and the forward pass of one depth. Embeddings and output projection are the trunk's."""

    def __init__(
        self,
        spec: HeadSpec,
        hidden_size: int,
        eps: float,
        layer: nn.Module,
        new_cache: Callable[[], Any] = KVCache,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.new_cache = new_cache  # makes mlx-lm's cache for one row of `layer`
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden_size, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden_size, eps=eps)
        self.fc: nn.Module = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layers = [layer]
        self.norm = nn.RMSNorm(hidden_size, eps=eps)

    def __call__(self, hidden: mx.array, embedded: mx.array, view: Any) -> tuple[mx.array, mx.array]:
        """`out` and the h for the next depth, both [rows, width, hidden]."""
        return self.after_fc(self.through_fc(hidden, embedded), view)

    def through_fc(self, hidden: mx.array, embedded: mx.array) -> mx.array:
        """The block's input.  [rows, width, hidden]"""
        parts = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        if not self.spec.embedding_first:
            parts.reverse()
        x: mx.array = self.fc(mx.concatenate(parts, axis=-1))
        return x

    def after_fc(self, x: mx.array, view: Any) -> tuple[mx.array, mx.array]:
        first = view[0] if isinstance(view, tuple) else view
        mask = first.make_mask(x.shape[1]) if isinstance(first, LayerView) else None
        # By name: in some families the mask is not the second parameter.
        x = self.layers[0](x, mask=mask, cache=view)
        out = self.norm(x)
        return out, out if self.spec.recurse_after_norm else x

    def cast_predicate(self, name: str) -> bool:
        """False for a parameter that stays in float32. (mlx-lm's models have a predicate of this name.)"""
        return not name.endswith(FLOAT32_SUFFIX)


def head_layout(head: MTPHead, trunk: Trunk) -> BlockLayout:
    """What one depth stores for a cell: the cache shapes after a pass that is not computed.

    Its keys and values have as many bits as the trunk's.
    """
    cache = head.new_cache()
    one = mx.zeros((1, 1, trunk.hidden_size), trunk.dtype)
    kind = type(head.layers[0]).__name__
    try:
        head(one, one, cache)
    except (AttributeError, TypeError, ValueError) as error:
        raise HeadError(f"a {kind} cannot be the layer of an MTP head: {error}") from error
    parts = getattr(cache, "caches", (cache,))
    if any(part.keys is None for part in parts):
        raise HeadError(f"a {kind} cannot be the layer of an MTP head: it stores no keys and values.")
    try:
        specs = tuple(kv_spec(part).quantized(trunk.kv_bits) for part in parts)
    except ValueError as error:
        raise HeadError(
            f"kv_bits={trunk.kv_bits}: the MTP head has {error}, so they cannot be quantised. "
            'Leave kv_bits out, or use drafter="ngram" or "none".'
        ) from None
    return specs if hasattr(cache, "caches") else specs[0]


def head_kv_spec(head: MTPHead, trunk: Trunk) -> KVSpec:
    """`head_layout` of a head that can be trained: one pair of buffers, no sliding window."""
    layout = head_layout(head, trunk)
    if isinstance(layout, KVSpec) and layout.window is None:
        return layout
    kind = type(head.layers[0]).__name__
    raise HeadError(
        f"a {kind} has several caches or a sliding window: such an MTP head can be served, not trained."
    )
