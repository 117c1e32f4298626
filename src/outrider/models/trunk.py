"""The trunk: a model without its MTP head, as two functions, `hidden` and `logits`, over ragged caches.

Uses mlx-lm's model definitions; models/layer_swaps.py lists the layers that get another class. Must not know
rows, plans or sampling.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_reduce

from outrider.cache.cell_format import BFLOAT16_BITS
from outrider.cache.placement import CommitCounts, GridPositions, Placement, Positions, block_tables
from outrider.cache.ragged_kv import KVSpec, LayerView, RaggedKV
from outrider.cache.recurrent import RecurrentState, StateSpec, StateView
from outrider.config import InvalidConfig
from outrider.cpu import extension, fast_math
from outrider.cpu.cells import native_write_cells
from outrider.cpu.fused_layers import use_layer_runs
from outrider.cpu.quantized import is_kept, quantized_layers
from outrider.models.adapters.store import TrunkAdapters
from outrider.models.families import LOGITS_ONLY, UnsupportedModel, unsupported
from outrider.models.gap_rope import use_gap_ropes
from outrider.models.layer_swaps import swap_layers, with_cpu_layers
from outrider.models.vision.mrope import MRopeSections
from outrider.plan import BLOCK_SIZE, NUM_SPARE_BLOCKS

Spec = KVSpec | StateSpec
Buffers = RaggedKV | RecurrentState
View = LayerView | StateView
Layout = Sequence[Spec | tuple[Spec, ...]]

STACK_NAMES = ("model", "transformer", "backbone")
EMBEDDING_NAMES = (
    "embed_tokens", "wte", "tok_embeddings", "token_embeddings", "word_embeddings", "embedding", "embeddings",
    "embed",
)  # fmt: skip


class _Passthrough:
    """Replaces a model's inner stack: returns its input, so that only the output projection remains."""

    def __init__(self, inner: nn.Module) -> None:
        self._inner = inner

    def __call__(self, *inputs: mx.array, **named: mx.array) -> mx.array:
        return next(iter((*inputs, *named.values())))  # some models pass their tokens by name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Trunk:
    """A loaded mlx-lm model as `tokens -> hidden -> logits`. Of a vision model, the language model.

    `mrope` and `num_deepstack` are for the language model of a vision family: see models/layer_swaps.py.
    """

    def __init__(
        self,
        model: nn.Module,
        max_context: int,
        mrope: MRopeSections | None = None,
        num_deepstack: int = 0,
    ) -> None:
        caches = _prompt_cache(model)
        self.network = model  # as mlx-lm has made it; of a vision model, with the parts around the next one
        if isinstance(part := getattr(model, "language_model", None), nn.Module):
            model = part  # of a vision model
        self.stack_name, self.embedding_name = _stack_and_embedding(model)
        self.model = model
        self.inner: nn.Module = getattr(model, self.stack_name)
        self.embedding: nn.Module = getattr(self.inner, self.embedding_name)
        self.max_context = max_context
        self.mrope = mrope
        embedded = self.embed(mx.zeros((1, 1), mx.int32))
        self.hidden_size = embedded.shape[-1]
        self.dtype = embedded.dtype
        self.layout = self._read_layout(caches)
        self.kv_bits: int | None = None  # of keys and values; None: those of their dtype
        self.adapters = TrunkAdapters(model, self.inner, self.dtype)
        swap_layers(model, mrope, num_deepstack)
        self._check_rows()
        self.projection = copy.copy(model)  # shares every parameter
        setattr(self.projection, self.stack_name, _Passthrough(self.inner))
        self.vocab_size = self.logits(mx.zeros((1, 1, self.hidden_size), self.dtype)).shape[-1]

    @property
    def num_bytes(self) -> int:
        return tree_reduce(lambda total, array: total + array.nbytes, self.model.parameters(), 0)

    def embed(self, token_ids: mx.array) -> mx.array:
        return self.embedding(token_ids)

    def hidden(
        self,
        token_ids: mx.array,
        cache: TrunkCache,
        placement: Placement,
        embeddings: mx.array | None = None,
    ) -> mx.array:
        """The hidden states after the final norm.  [rows, width] -> [rows, width, hidden]

        `embeddings` [rows, width, hidden] replace the token embeddings where images are among the tokens.
        """
        views = cache.views(placement)
        if not placement.deepstack:
            placement.layer_buffers = cache.layers
        with self.adapters.current_pass.of(placement.adapters):
            if embeddings is not None:
                return self.inner(token_ids, cache=views, input_embeddings=embeddings)
            return self.inner(token_ids, cache=views)

    @property
    def output(self) -> nn.Module:
        """The layer of the output projection; of tied weights, the embedding."""
        return getattr(self.model, "lm_head", None) or self.embedding

    def logits(self, hidden: mx.array) -> mx.array:
        """The model's own output projection, soft caps and scales included, in float32."""
        return self.projection(hidden).astype(mx.float32)

    def _read_layout(self, caches: list[Any]) -> Layout:
        """What every layer stores: the cache shapes after a pass over one token that is not computed."""
        hidden = self.inner(mx.zeros((1, 1), mx.int32), cache=caches)
        if hidden.shape[-1] != self.hidden_size:
            raise _refusal(self.model, LOGITS_ONLY)
        return [
            tuple(_spec(part) for part in layer.caches) if hasattr(layer, "caches") else _spec(layer)
            for layer in caches
        ]

    def use_kv_bits(self, bits: int | None) -> None:
        """Store keys and values with so many bits. Raises InvalidConfig if a layer cannot."""
        family, own_bits = _family(self.model), 8 * self.dtype.size
        if bits is not None and bits > own_bits:
            dtype = str(self.dtype).removeprefix("mlx.core.")
            raise InvalidConfig(
                f"kv_bits={bits}: {family} computes in {dtype}, which has {own_bits} bits. Leave kv_bits out."
            )
        if bits == own_bits:
            bits = None
        if bits is not None and not self.kv_specs:
            raise InvalidConfig(
                f"kv_bits={bits}: no layer of {family} stores keys and values. Leave kv_bits out."
            )
        try:
            self.layout = [
                tuple(_quantized(part, bits) for part in layer)
                if isinstance(layer, tuple)
                else _quantized(layer, bits)
                for layer in self.layout
            ]
        except ValueError as error:
            raise InvalidConfig(
                f"kv_bits={bits}: {family} has {error}, so they cannot be quantised. Leave kv_bits out."
            ) from None
        self.kv_bits = bits

    def default_kv_bits(self) -> int | None:
        """Bits of keys and values where nobody has chosen them; None: those of their dtype.

        A quantised model on a CPU computes in float32. Where its attention reads cells in place, they are
        bfloat16: attention over a long row takes as long as its cells take to be read from memory.
        """
        is_quantized = any(is_kept(layer) for _, layer in quantized_layers(self.model))
        if not is_quantized or self.dtype != mx.float32 or not fast_math.applies():
            return None
        with with_cpu_layers(self.model):
            return BFLOAT16_BITS if self.reads_blocks else None

    @property
    def kv_specs(self) -> list[KVSpec]:
        """What the attention layers store."""
        return [spec for layer in self.layout for spec in _parts(layer) if isinstance(spec, KVSpec)]

    @property
    def has_states(self) -> bool:
        """Whether a layer keeps a recurrent state."""
        return any(isinstance(spec, StateSpec) for layer in self.layout for spec in _parts(layer))

    def allow_gaps(self) -> None:
        """Let tokens of prompts be skipped. Call it before `prepare_for_serving`. Raises InvalidConfig."""
        reason = self.no_gaps_reason
        if reason is None:
            use_gap_ropes(self.model)
            grid = GridPositions(mx.zeros((3, 7, 2), mx.int32))
            try:
                self.dry_run(positions=grid)
            except (AttributeError, TypeError, ValueError) as error:
                reason = f"its layers cannot take a position for each token ({error})"
        if reason is not None:
            raise InvalidConfig(f"{_family(self.model)} cannot skip tokens of prompts: {reason}")

    @property
    def no_gaps_reason(self) -> str | None:
        """Why no token of a prompt can be skipped; None: it can, as far as the caches tell."""
        specs = [spec for layer in self.layout for spec in _parts(layer)]
        if any(not isinstance(spec, KVSpec) for spec in specs):
            return "its recurrent layers have one state, which every token changes"
        if any(isinstance(spec, KVSpec) and spec.window is not None for spec in specs):
            return "its sliding windows count the tokens that are read, not their positions"
        if not any(hasattr(module, "rope") for _, module in self.model.named_modules()):
            return "its positions are not rope's"
        return None

    def prepare_for_serving(self) -> None:
        """Swap layers for speed. Weights must not be changed afterwards."""
        if self.kv_bits is not None and fast_math.applies():
            # Also for weights that are not quantised: native attention reads quantised cells where they are.
            # MLX's operations would dequantise all cells in every layer.
            extension.extension()
        swap_layers(self.model, dry_run=self.dry_run)
        use_layer_runs(self.model, self.dry_run)

    @property
    def reads_blocks(self) -> bool:
        """Whether attention reads rows' blocks where they are, in all layers; if not, it copies them."""
        num_layers = sum(isinstance(buffers, RaggedKV) for buffers in TrunkCache(self.layout).buffers())
        return self.dry_run(in_blocks=True).num_native == num_layers

    def dry_run(self, in_blocks: bool = False, positions: Positions | None = None) -> Placement:
        """Build a pass over a few rows without computing it."""
        rows, capacity = 7, 8
        tables = block_tables([[NUM_SPARE_BLOCKS + row] for row in range(rows)]) if in_blocks else None
        cache = TrunkCache(self.layout)
        for buffers in cache.buffers():
            if in_blocks and isinstance(buffers, RaggedKV):
                buffers.resize_blocks(NUM_SPARE_BLOCKS + rows, BLOCK_SIZE)
            else:
                buffers.resize(rows, capacity)
        fed = mx.ones(rows, mx.int32)
        place = Placement(
            range(rows), mx.arange(rows), fed, 2, capacity, capacity, positions=positions, tables=tables
        )
        self.hidden(mx.zeros((rows, 2), mx.int32), cache, place)
        cache.commit(fed)
        return place

    def _check_rows(self) -> None:
        """Raise UnsupportedModel for a model that takes one position, or one mask, for all rows.

        Such a model fails in a pass over more rows than it has groups of heads.
        """
        try:
            self.dry_run()
        except (AttributeError, TypeError, ValueError) as error:
            reason = f"its layers cannot take rows of different lengths ({error})"
            raise _refusal(self.model, reason) from error


class TrunkCache:
    """All layers' buffers, in the arrangement that the model's layers expect."""

    def __init__(self, layout: Layout) -> None:
        self.layers = [
            tuple(_buffers(part) for part in spec) if isinstance(spec, tuple) else _buffers(spec)
            for spec in layout
        ]
        self._uncommitted: list[StateView] = []

    def buffers(self) -> Iterator[Buffers]:
        for layer in self.layers:
            if isinstance(layer, tuple):
                yield from layer
            else:
                yield layer

    def views(self, placement: Placement) -> list[View | tuple[View, ...]]:
        """The views for one pass. With recurrent layers, `commit` must follow before the next pass."""
        self._uncommitted = []

        def view(buffers: Buffers) -> View:
            if isinstance(buffers, RaggedKV):
                return LayerView(buffers, placement)
            self._uncommitted.append(StateView(buffers, placement))
            return self._uncommitted[-1]

        return [
            tuple(view(part) for part in layer) if isinstance(layer, tuple) else view(layer)
            for layer in self.layers
        ]

    def states(self) -> list[list[mx.array]]:
        """The recurrent states of all layers, as they are now."""
        # New objects: a later pass changes the arrays of a RecurrentState in place.
        return [[mx.array(part) for part in layer.parts] for layer in self._recurrent_layers()]

    def put_states(self, states: list[list[mx.array]]) -> None:
        for layer, own in zip(self._recurrent_layers(), states, strict=True):
            layer.put(own)

    def _recurrent_layers(self) -> list[RecurrentState]:
        return [buffers for buffers in self.buffers() if isinstance(buffers, RecurrentState)]

    def commit(self, num_committed: mx.array) -> None:
        """Write the states of recurrent layers after the first `num_committed` [rows] tokens of the pass."""
        counts = CommitCounts(num_committed)
        for view in self._uncommitted:
            view.commit(counts)
        self._uncommitted = []


def _parts(layer: Spec | tuple[Spec, ...]) -> tuple[Spec, ...]:
    return layer if isinstance(layer, tuple) else (layer,)


def _quantized(spec: Spec, bits: int | None) -> Spec:
    return spec.quantized(bits) if isinstance(spec, KVSpec) else spec


def _buffers(spec: Spec) -> Buffers:
    return RaggedKV(spec, native_write_cells()) if isinstance(spec, KVSpec) else RecurrentState(spec)


def _prompt_cache(model: nn.Module) -> list[Any]:
    """mlx-lm's own caches for one row. Raises UnsupportedModel for a kind that has no ragged counterpart."""
    from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

    caches: list[Any] = make_prompt_cache(model)
    for layer in caches:
        for part in getattr(layer, "caches", (layer,)):
            if type(part) not in (KVCache, RotatingKVCache, ArraysCache):
                kind = type(part).__name__
                raise _refusal(model, f"its cache is a {kind}, which cannot be rolled back for each row")
    return caches


def _stack_and_embedding(model: nn.Module) -> tuple[str, str]:
    """The names of a model's inner stack and of the token embeddings in it."""
    for stack in STACK_NAMES:
        for embedding in EMBEDDING_NAMES:
            if isinstance(getattr(getattr(model, stack, None), embedding, None), nn.Module):
                return stack, embedding
    raise _refusal(model, "no inner stack with token embeddings was found in it")


def _spec(layer: Any) -> Spec:
    """What a layer stores: the shapes of mlx-lm's cache after a pass over one token of one row."""
    if hasattr(layer, "keys"):
        return kv_spec(layer)
    return StateSpec(tuple(part.shape[1:] for part in layer.cache), tuple(part.dtype for part in layer.cache))


def kv_spec(cache: Any) -> KVSpec:
    """The shapes of a KV cache of mlx-lm that holds one token of one row."""
    _, num_heads, _, key_dim = cache.keys.shape
    window = getattr(cache, "max_size", None)
    return KVSpec(num_heads, key_dim, cache.values.shape[-1], cache.keys.dtype, window)


def _family(model: nn.Module) -> str:
    return type(model).__module__.rpartition(".")[2]


def _refusal(model: nn.Module, reason: str) -> UnsupportedModel:
    return unsupported(_family(model), reason)
