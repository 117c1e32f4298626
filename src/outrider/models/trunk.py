"""The trunk: a model without its MTP head, as two functions, `hidden` and `logits`, over ragged caches.

Works on mlx-lm's model definitions as they are. Must not know rows, plans or sampling.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_reduce

from outrider.cache.ragged_kv import KVSpec, LayerView, Placement, RaggedKV
from outrider.models.families import LOGITS_ONLY, UnsupportedModel, unsupported

STACK_NAMES = ("model", "transformer")
EMBEDDING_NAMES = (
    "embed_tokens", "wte", "tok_embeddings", "token_embeddings", "word_embeddings", "embedding", "embed",
)  # fmt: skip


class _Passthrough:
    """Stands in for a model's inner stack: hands its input on, so that only the output projection remains."""

    def __init__(self, inner: nn.Module) -> None:
        self._inner = inner

    def __call__(self, *inputs: mx.array, **named: mx.array) -> mx.array:
        return next(iter((*inputs, *named.values())))  # some models pass their tokens by name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Trunk:
    """A loaded mlx-lm model seen as `tokens -> hidden -> logits`."""

    def __init__(self, model: nn.Module, max_context: int) -> None:
        caches = _prompt_cache(model)
        stack_name, embedding_name = _stack_and_embedding(model)
        self.model = model
        self.inner: nn.Module = getattr(model, stack_name)
        self.embedding: nn.Module = getattr(self.inner, embedding_name)
        self.max_context = max_context
        embedded = self.embed(mx.zeros((1, 1), mx.int32))
        self.hidden_size = embedded.shape[-1]
        self.dtype = embedded.dtype
        self.layout = self._read_layout(caches)
        self._check_rows()
        self._projection = copy.copy(model)  # shares every parameter
        setattr(self._projection, stack_name, _Passthrough(self.inner))
        self.vocab_size = self.logits(mx.zeros((1, 1, self.hidden_size), self.dtype)).shape[-1]

    @property
    def num_bytes(self) -> int:
        return tree_reduce(lambda total, array: total + array.nbytes, self.model.parameters(), 0)

    def embed(self, token_ids: mx.array) -> mx.array:
        return self.embedding(token_ids)

    def hidden(self, token_ids: mx.array, cache: TrunkCache, placement: Placement) -> mx.array:
        """The hidden states after the final norm.  [rows, width] -> [rows, width, hidden]"""
        return self.inner(token_ids, cache=cache.views(placement))

    def logits(self, hidden: mx.array) -> mx.array:
        """The model's own output projection, soft caps and scales included, in float32."""
        return self._projection(hidden).astype(mx.float32)

    def _read_layout(self, caches: list[Any]) -> list[KVSpec | tuple[KVSpec, ...]]:
        """What every layer stores, read off the shapes of one token's (never computed) pass."""
        hidden = self.inner(mx.zeros((1, 1), mx.int32), cache=caches)
        if hidden.shape[-1] != self.hidden_size:
            raise _refusal(self.model, LOGITS_ONLY)
        return [
            tuple(_kv_spec(part) for part in layer.caches) if hasattr(layer, "caches") else _kv_spec(layer)
            for layer in caches
        ]

    def _check_rows(self) -> None:
        """Raise UnsupportedModel where a model takes one position, or one mask, for all rows.

        Such a model fails on a (never computed) pass over more rows than it has groups of heads.
        """
        rows, capacity = 7, 8
        cache = TrunkCache(self.layout)
        for kv in cache.buffers():
            kv.resize(rows, capacity)
        place = Placement(range(rows), mx.arange(rows), mx.ones(rows, mx.int32), 2, capacity, capacity)
        try:
            self.hidden(mx.zeros((rows, 2), mx.int32), cache, place)
        except (AttributeError, TypeError, ValueError) as error:
            reason = f"its layers cannot take rows of different lengths ({error})"
            raise _refusal(self.model, reason) from error


class TrunkCache:
    """All layers' buffers, in the arrangement that the model's layers expect."""

    def __init__(self, layout: Sequence[KVSpec | tuple[KVSpec, ...]]) -> None:
        self._layers: list[RaggedKV | tuple[RaggedKV, ...]] = [
            RaggedKV(spec) if isinstance(spec, KVSpec) else tuple(RaggedKV(part) for part in spec)
            for spec in layout
        ]

    def buffers(self) -> Iterator[RaggedKV]:
        for layer in self._layers:
            if isinstance(layer, RaggedKV):
                yield layer
            else:
                yield from layer

    def views(self, placement: Placement) -> list[LayerView | tuple[LayerView, ...]]:
        return [
            LayerView(layer, placement)
            if isinstance(layer, RaggedKV)
            else tuple(LayerView(part, placement) for part in layer)
            for layer in self._layers
        ]


def _prompt_cache(model: nn.Module) -> list[Any]:
    """mlx-lm's own caches for one row, all of a kind that a ragged cache can stand in for."""
    from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

    caches: list[Any] = make_prompt_cache(model)
    for layer in caches:
        for part in getattr(layer, "caches", (layer,)):
            if type(part) not in (KVCache, RotatingKVCache):
                kind = type(part).__name__
                raise _refusal(model, f"it keeps a {kind}, which cannot be rolled back per row")
    return caches


def _stack_and_embedding(model: nn.Module) -> tuple[str, str]:
    """The names of a model's inner stack and of the token embeddings in it."""
    for stack in STACK_NAMES:
        for embedding in EMBEDDING_NAMES:
            if isinstance(getattr(getattr(model, stack, None), embedding, None), nn.Module):
                return stack, embedding
    raise _refusal(model, "no inner stack with token embeddings was found in it")


def _kv_spec(layer: Any) -> KVSpec:
    _, num_heads, _, key_dim = layer.keys.shape
    window = getattr(layer, "max_size", None)
    return KVSpec(num_heads, key_dim, layer.values.shape[-1], layer.keys.dtype, window)


def _refusal(model: nn.Module, reason: str) -> UnsupportedModel:
    return unsupported(type(model).__module__.rpartition(".")[2], reason)
