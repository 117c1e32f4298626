"""The head as a module: the arithmetic of one depth, the same for every family.

    x    = fc(concat[norm(embed(x_(t+1))), norm(h_t)])       h_t after the trunk's final norm
    x    = a decoder block, over its own pairs
    out  = norm(x);  logits = the trunk's projection(out)     guesses x_(t+2)

What differs between families (concat order, what the next depth is given as h) is data: a HeadSpec.
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
from outrider.models.trunk import Trunk

BlockLayout = KVSpec | tuple[KVSpec, ...]  # what a block stores for a pair: one pair of buffers, or several


class MTPHead(nn.Module):
    """One depth's parameters and forward pass; embeddings and projection are the trunk's."""

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
        self.new_cache = new_cache  # mlx-lm's cache for one row of `layer`
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden_size, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden_size, eps=eps)
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layers = [layer]
        self.norm = nn.RMSNorm(hidden_size, eps=eps)

    def __call__(self, hidden: mx.array, embedded: mx.array, view: Any) -> tuple[mx.array, mx.array]:
        """(out, what the next depth is given as h), both [rows, width, hidden]."""
        parts = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        if not self.spec.embedding_first:
            parts.reverse()
        x = self.fc(mx.concatenate(parts, axis=-1))
        first = view[0] if isinstance(view, tuple) else view
        mask = first.make_mask(x.shape[1]) if isinstance(first, LayerView) else None
        x = self.layers[0](x, mask=mask, cache=view)  # by name: in some families the second is not the mask
        out = self.norm(x)
        return out, out if self.spec.recurse_after_norm else x


def head_layout(head: MTPHead, trunk: Trunk) -> BlockLayout:
    """What one depth stores for a pair, read off the shapes of a pass that is never computed."""
    probe = head.new_cache()
    one = mx.zeros((1, 1, trunk.hidden_size), trunk.dtype)
    kind = type(head.layers[0]).__name__
    try:
        head(one, one, probe)
    except (AttributeError, TypeError, ValueError) as error:
        raise HeadError(f"a {kind} cannot be the layer of an MTP head: {error}") from error
    parts = getattr(probe, "caches", (probe,))
    if any(part.keys is None for part in parts):
        raise HeadError(f"a {kind} cannot be the layer of an MTP head: it keeps no keys and values.")
    specs = tuple(_kv_spec(part) for part in parts)
    return specs if hasattr(probe, "caches") else specs[0]


def head_kv_spec(head: MTPHead, trunk: Trunk) -> KVSpec:
    """The same, for a head that can be trained: its block keeps one pair of buffers and sees all of it."""
    layout = head_layout(head, trunk)
    if isinstance(layout, KVSpec) and layout.window is None:
        return layout
    kind = type(head.layers[0]).__name__
    raise HeadError(
        f"a {kind} keeps several caches or a sliding window: such an MTP head can be served, not trained."
    )


def _kv_spec(cache: Any) -> KVSpec:
    _, num_heads, _, key_dim = cache.keys.shape
    window = getattr(cache, "max_size", None)
    return KVSpec(num_heads, key_dim, cache.values.shape[-1], cache.keys.dtype, window)
