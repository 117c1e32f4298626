"""What a request gives alone, without drafts, batches, ragged caches or this engine at all.

Tokens come from mlx-lm's own model and caches and from the NumPy oracle of the picking rule. Cells come from
one pass over the whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

import sampling_oracle as oracle
from outrider.models.heads import MTPHead
from outrider.models.layer_swaps import without_speed_swaps
from outrider.request import SamplingParams
from step.row_grammars import EOS_IDS, allowed_by

Feed = Callable[[Sequence[int]], np.ndarray]  # more tokens of one row -> logits after the last of them
Cells = list[tuple[np.ndarray, ...]]  # of each layer: keys and values [heads, cells, dim], or its states


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    is_firm: tuple[bool, ...]  # whether rounding cannot explain another choice at this place
    logprobs: tuple[np.ndarray, ...]  # the model's own, over the vocabulary, at each place


def mlx_lms(model: nn.Module) -> Feed:
    """A row of mlx-lm's own model and caches."""
    cache = make_prompt_cache(model)

    def feed(token_ids: Sequence[int]) -> np.ndarray:
        with without_speed_swaps(model):
            return np.array(model(mx.array([list(token_ids)]), cache=cache)[0, -1].astype(mx.float32))

    return feed


def solo_answer(
    model: nn.Module,
    prompt: Sequence[int],
    params: SamplingParams,
    so_far: Sequence[int] = (),
    feed: Feed | None = None,
) -> Answer:
    """The plain answer from its beginning, or as it continues after `so_far`."""
    assert params.max_tokens is not None
    feed = feed or mlx_lms(model)
    answer, firm, logprobs = list(so_far), [True] * len(so_far), [np.zeros(0)] * len(so_far)
    fed: list[int] = [*prompt, *so_far]
    allowed_after = allowed_by(params.grammar)
    stop_ids = stop_ids_of(params)
    while len(answer) < params.max_tokens:
        logits = feed(fed).astype(np.float64)
        edited = oracle.edited(logits, params, prompt, answer, stop_ids, allowed_after(answer))
        choice = oracle.choose(edited, len(prompt) + len(answer), params)
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


def _filled_part(cache: KVCache | ArraysCache) -> tuple[np.ndarray, ...]:
    if isinstance(cache, ArraysCache):
        return tuple(np.array(part[0]) for part in cache.cache)
    return np.array(cache.keys[0, :, : cache.offset]), np.array(cache.values[0, :, : cache.offset])
