"""Scores the tokens of a prompt, so that a request can skip the least important ones (spec_prefill).

The scorer runs the first layers of a model over the prompt: of the served model itself, or of a smaller one
with the same tokens. In the last of these layers a token's score is the most attention that any head gives it
from one of the prompt's last tokens, which usually ask the question.

    layers 0 .. n-2    computed
    layer  n-1         queries and keys only: nothing else of it is needed, so MLX does not compute it

(An MTP head cannot score: it reads the trunk's last hidden states, so the prompt would have been computed.)
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import base

from outrider import function_swaps
from outrider.cache.placement import Placement
from outrider.cache.ragged_kv import KVSpec, LayerView, RaggedKV
from outrider.config import InvalidConfig
from outrider.cpu import fast_math
from outrider.models.layer_swaps import PLAIN_CLASSES
from outrider.models.trunk import Trunk, TrunkCache

NUM_QUERIES = 32  # last tokens of a prompt whose attention counts; chosen by hand
DEFAULT_LAYER_SHARE = 0.5  # of a model's layers; retrieval was found from the middle on (docs/BENCHMARKS.md)
CAPACITY_STEP = 1024  # cells; chosen by hand


class PromptScorer:
    """Reads one prompt at a time, part by part. Make it when the trunk's layers are those that serve."""

    def __init__(self, trunk: Trunk, num_layers: int | None = None) -> None:
        """`num_layers`: None: a half of the model's. Raises InvalidConfig if this model cannot score."""
        layers = list(getattr(trunk.inner, "layers", ()))
        default = max(1, round(DEFAULT_LAYER_SHARE * len(layers)))
        self.num_layers = default if num_layers is None else num_layers
        if not 1 <= self.num_layers <= len(layers):
            raise InvalidConfig(
                f"spec_prefill_layers must be from 1 to {len(layers)}, the layers of the scoring model, not "
                f"{self.num_layers}"
            )
        self._trunk = trunk
        self._layout = trunk.layout[: self.num_layers]
        self._inner = copy.copy(trunk.inner)  # shares every parameter
        self._inner.layers = [*layers[: self.num_layers - 1], _observed_layer(layers[self.num_layers - 1])]
        self.drop()
        self._check()

    @property
    def model(self) -> nn.Module:
        return self._trunk.model

    @property
    def max_context(self) -> int:
        return self._trunk.max_context

    def drop(self) -> None:
        """Forget the prompt that was read."""
        self._cache = TrunkCache(self._layout)
        self._num_read = self._capacity = 0
        self._queries: mx.array | None = None  # [1, heads, up to NUM_QUERIES, dim] of the last tokens
        self._scale = 1.0

    def read(self, token_ids: Sequence[int], start: int, num_prompt: int) -> None:
        """Read the tokens from `start` on of a prompt of `num_prompt` tokens. 0: a new prompt begins."""
        if start == 0:
            self.drop()
            self._capacity = -(-num_prompt // CAPACITY_STEP) * CAPACITY_STEP
            for buffers in self._cache.buffers():
                buffers.resize(1, self._capacity)
        if start != self._num_read:
            raise ValueError(f"the scorer has read {self._num_read} tokens, and gets those from {start} on")
        view = self._run(token_ids, start)
        assert view.queries is not None
        seen = [view.queries] if self._queries is None else [self._queries, view.queries]
        self._queries = mx.concatenate(seen, axis=2)[:, :, -NUM_QUERIES:]
        self._scale = view.scale
        self._num_read = start + len(token_ids)
        mx.eval(self._queries, [array for buffers in self._cache.buffers() for array in buffers.arrays()])

    def scores(self) -> np.ndarray:
        """The scores of all tokens of the prompt, which is then forgotten.  float32 [tokens]"""
        assert self._queries is not None
        num_read, num_queries = self._num_read, self._queries.shape[2]
        place = self._place(num_read - num_queries, num_queries)
        keys = self._last_buffers().key_cells.read(place)[0, :, :num_read]
        queries = self._queries[0].astype(mx.float32).reshape(keys.shape[0], -1, num_queries, keys.shape[-1])
        attended = mx.arange(num_read) <= mx.arange(num_read - num_queries, num_read)[:, None]
        most = mx.zeros(num_read)
        for own, cells in zip(queries, keys, strict=True):  # by key head: all at once take much memory
            found = own @ cells.astype(mx.float32).T * self._scale  # [heads, queries, cells]
            weights = mx.softmax(mx.where(attended, found, -mx.inf), axis=-1)
            most = mx.maximum(most, weights.max(axis=(0, 1)))
            mx.eval(most)
        self.drop()
        return np.array(most)

    def _run(self, token_ids: Sequence[int], start: int) -> _ObservedView:
        place = self._place(start, len(token_ids))
        observed = _ObservedView(self._last_buffers(), place)
        with self._trunk.adapters.current_pass.of(place.adapters):
            self._inner(mx.array([list(token_ids)]), cache=[*self._cache.views(place)[:-1], observed])
        self._cache.commit(place.num_fed)
        return observed

    def _place(self, start: int, size: int) -> Placement:
        starts, num_fed = mx.array([start]), mx.array([size])
        adapters = self._trunk.adapters.of_pass(None)  # those of all requests
        return Placement(
            [0],
            starts,
            num_fed,
            size,
            start + size,
            self._capacity,
            commits_all=True,
            launches=True,
            adapters=adapters,
        )

    def _last_buffers(self) -> RaggedKV:
        *_, last = self._cache.buffers()
        assert isinstance(last, RaggedKV)
        return last

    def _check(self) -> None:
        """Raise InvalidConfig for a model whose last layer here does not show queries that fit its keys."""
        kind = type(self._trunk.model).__module__.rpartition(".")[2]
        if not all(isinstance(spec, KVSpec) and spec.window is None for spec in self._layout):
            raise InvalidConfig(
                f"{kind} cannot score prompts: its first {self.num_layers} layers are not all full attention"
            )
        try:
            self.read([0, 0], 0, 2)
            self.scores()
        except (AttributeError, AssertionError, TypeError, ValueError) as error:
            raise InvalidConfig(f"{kind} cannot score prompts: its attention is of another form") from error


class _ObservedView(LayerView):
    """A layer's buffers, with the queries that the layer attends with."""

    def __init__(self, kv: RaggedKV, placement: Placement) -> None:
        super().__init__(kv, placement)
        self.queries: mx.array | None = None  # [1, heads, width, dim]
        self.scale = 1.0


def _attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's scaled_dot_product_attention, which leaves its queries with the view.

    A mask that is added to the scores has a part of them: latent attention, whose queries do not suffice.
    """
    is_plain = isinstance(keys, mx.array) and (mask is None or mask.dtype == mx.bool_)
    if isinstance(cache, _ObservedView) and is_plain:
        cache.queries, cache.scale = queries, scale
    attend = fast_math.attention if fast_math.applies() else base.scaled_dot_product_attention
    return attend(queries, keys, values, cache, scale, mask, sinks=sinks)


def _observed_layer(layer: nn.Module) -> nn.Module:
    """A copy of a layer, with the same parameters, whose attention is `_attention`."""
    observed = _plain(layer)
    for name, part in layer.items():
        if isinstance(part, nn.Module):
            plain = _plain(part)
            kind: type[nn.Module] = type(plain)
            plain.__class__ = function_swaps.with_functions(kind, _FUNCTIONS)
            observed[name] = plain
    return observed


def _plain(module: nn.Module) -> nn.Module:
    """A copy with mlx-lm's own class."""
    found = copy.copy(module)
    kind: type[nn.Module] = type(module)
    for plain_class in PLAIN_CLASSES:
        kind = plain_class(kind)
    found.__class__ = kind
    return found


_FUNCTIONS = ((base.scaled_dot_product_attention, _attention),)
