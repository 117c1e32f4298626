"""What a request gives alone: without drafts, batches, chunks or neighbours.

Tokens come from the NumPy oracle of the picking rule. Cells come from one pass over the whole text. The
logits of a model in float32 are those of mlx-lm's own model and caches.

A quantised model rounds tokens, which magnifies a difference in the last bit of a float. Its logits are
therefore those of the engine's own layers, which must be the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

import sampling_oracle as oracle
from outrider.cache.placement import Placement
from outrider.models.heads import MTPHead, head_layout
from outrider.models.layer_swaps import without_speed_swaps
from outrider.models.trunk import Trunk, TrunkCache
from outrider.request import SamplingParams
from ragged_rows import RaggedRows
from step.row_grammars import EOS_IDS, allowed_by
from step.row_thinking import allowed_by_budget, both

Row = Callable[[Sequence[int]], np.ndarray]  # the row's next tokens -> the logits after the last  [vocab]
Cells = list[tuple[np.ndarray, ...]]  # of each layer: keys and values [heads, cells, dim], or its states


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    is_firm: tuple[bool, ...]  # whether rounding cannot explain another choice at this place
    logprobs: tuple[np.ndarray, ...]  # the model's own, over the vocabulary, at each place


def mlx_lm_row(model: nn.Module) -> Row:
    """A new row of mlx-lm's own model and caches."""
    cache = make_prompt_cache(model)
    # As `without_speed_swaps`, which would look for the swapped modules again for each token.
    modules = [module for _, module in model.named_modules()]
    own = [type(module) for module in modules]
    with without_speed_swaps(model):
        plain = [type(module) for module in modules]
    changes = [found for found in zip(modules, own, plain, strict=True) if found[1] is not found[2]]

    def feed(token_ids: Sequence[int]) -> np.ndarray:
        for module, _, kind in changes:
            module.__class__ = kind
        try:
            return np.array(model(mx.array([list(token_ids)]), cache=cache)[0, -1].astype(mx.float32))
        finally:
            for module, kind, _ in changes:
                module.__class__ = kind

    return feed


def engine_row(trunk: Trunk, adapter: int = 0) -> Row:
    """A new row of a trunk as it is served, the only one."""
    rows = RaggedRows(trunk, num_slots=1, capacity=trunk.max_context)
    rows.join("alone", slot=0, adapter=adapter)

    return lambda token_ids: rows.feed({"alone": token_ids})["alone"][-1]


def solo_answer(
    row: Row,
    prompt: Sequence[int],
    params: SamplingParams,
    so_far: Sequence[int] = (),
    tolerance: float = oracle.TOLERANCE,
) -> Answer:
    """The plain answer from its beginning, or as it continues after `so_far`; `row` is a new one.

    `tolerance`: by how much logits may differ.
    """
    assert params.max_tokens is not None
    answer, firm, logprobs = list(so_far), [True] * len(so_far), [np.zeros(0)] * len(so_far)
    fed: list[int] = [*prompt, *so_far]
    allowed_after = both(allowed_by(params.grammar), allowed_by_budget(params))
    stop_ids = stop_ids_of(params)
    while len(answer) < params.max_tokens:
        logits = row(fed).astype(np.float64)
        edited = oracle.edited(logits, params, prompt, answer, stop_ids, allowed_after(answer))
        choice = oracle.choose(edited, len(prompt) + len(answer), params, tolerance)
        answer.append(choice.token_id)
        firm.append(choice.is_firm)
        logprobs.append(oracle.log_softmax(logits))
        if choice.token_id in stop_ids:
            break
        fed = [choice.token_id]
    return Answer(tuple(answer), tuple(firm), tuple(logprobs))


def stop_ids_of(params: SamplingParams) -> frozenset[int]:
    """The tiny models know no end, but where a grammar says that it has come."""
    return frozenset(params.stop_token_ids) | (EOS_IDS if params.grammar is not None else frozenset())


def fresh_cells(model: nn.Module, head: MTPHead | None, token_ids: Sequence[int]) -> Cells:
    """What a decoding row with these committed tokens must hold: all but the last, and the head's pairs."""
    parts = [model, *([head] if head is not None else [])]
    with without_speed_swaps(*parts):
        return _fresh_cells(model, head, token_ids)


def _fresh_cells(model: nn.Module, head: MTPHead | None, token_ids: Sequence[int]) -> Cells:
    inner = model.model
    caches = [layer if type(layer) is ArraysCache else KVCache() for layer in make_prompt_cache(model)]
    hidden = inner(mx.array([token_ids[:-1]]), cache=caches)
    if head is not None:
        pairs = KVCache()
        head(
            hidden, inner.embed_tokens(mx.array([token_ids[1:]])), pairs
        )  # one layer: its cells need no mask
        caches.append(pairs)
    return [_filled_part(cache) for cache in caches]


def engine_cells(trunk: Trunk, head: MTPHead | None, token_ids: Sequence[int]) -> Cells:
    """`fresh_cells` of a trunk and a head as they are served."""
    num_cells = len(token_ids) - 1
    place = Placement([0], mx.array([0]), mx.array([num_cells]), num_cells, num_cells, num_cells)
    caches = [TrunkCache(trunk.layout), *([TrunkCache([head_layout(head, trunk)])] if head else [])]
    for buffers in (buffers for cache in caches for buffers in cache.buffers()):
        buffers.resize(1, num_cells)
    hidden = trunk.hidden(mx.array([token_ids[:-1]]), caches[0], place)
    caches[0].commit(mx.array([num_cells]))
    if head is not None:
        head(hidden, trunk.embed(mx.array([token_ids[1:]])), caches[1].views(place)[0])
    return [
        tuple(as_numpy(array[0]) for array in buffers.arrays())
        for cache in caches
        for buffers in cache.buffers()
    ]


def as_numpy(array: mx.array) -> np.ndarray:
    """NumPy has no bfloat16."""
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


def _filled_part(cache: KVCache | ArraysCache) -> tuple[np.ndarray, ...]:
    if isinstance(cache, ArraysCache):
        return tuple(np.array(part[0]) for part in cache.cache)
    return np.array(cache.keys[0, :, : cache.offset]), np.array(cache.values[0, :, : cache.offset])
