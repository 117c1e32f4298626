"""Picking: the one rule that turns logits into tokens, for targets and for drafts alike.

    token at p = argmax over the tokens the filters leave of  logits / temperature + gumbel(seed, p, token)

Greedy rows are the case without noise. Rows that filter look at their best candidates only; whether those
were enough is checked, and if they were not, the whole vocabulary is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from outrider.request import SamplingParams
from outrider.sampling.noise import gumbel, seed_words

NUM_CANDIDATES = 1024
NUM_DRAFT_CANDIDATES = 128
LEAST_TEMPERATURE = (
    1e-30  # below it float32 would overflow; far above it the noise has long stopped to matter
)


def pick(logits: mx.array, positions: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    """The target tokens.  logits [rows, n, vocab], positions [rows, n] of the picked tokens -> [rows, n]"""
    return _by_kind(logits, positions, params, None, exact=True)


def pick_drafts(
    logits: mx.array, positions: mx.array, params: Sequence[SamplingParams], token_ids: mx.array | None
) -> mx.array:
    """Draft tokens by the same rule and noise. A draft may be wrong, so it never looks at many candidates.

    token_ids [vocab] names the columns of the logits when the draft vocabulary is a reduced one.
    """
    return _by_kind(logits, positions, params, token_ids, exact=False)


def _by_kind(
    logits: mx.array,
    positions: mx.array,
    params: Sequence[SamplingParams],
    token_ids: mx.array | None,
    exact: bool,
) -> mx.array:
    """Split the rows into greedy, sampled and filtered ones; pick each kind at once; put them together."""
    kinds: dict[str, list[int]] = {}
    for row, p in enumerate(params):
        kind = "greedy" if p.is_greedy else "filtered" if p.is_filtered else "sampled"
        kinds.setdefault(kind, []).append(row)
    parts = []
    for kind, rows in kinds.items():
        some = len(rows) < len(params)
        part_logits = logits[mx.array(rows)] if some else logits
        part_positions = positions[mx.array(rows)] if some else positions
        part_params = [params[row] for row in rows]
        if kind == "greedy":
            columns = mx.argmax(part_logits, axis=-1)
            parts.append(columns if token_ids is None else token_ids[columns])
        elif kind == "sampled":
            parts.append(_pick_sampled(part_logits, part_positions, part_params, token_ids))
        else:
            parts.append(_pick_filtered(part_logits, part_positions, part_params, token_ids, exact))
    if len(parts) == 1:
        return parts[0].astype(mx.int32)
    order = [row for rows in kinds.values() for row in rows]
    back = mx.array(sorted(range(len(order)), key=order.__getitem__))
    return mx.concatenate([part.astype(mx.int32) for part in parts])[back]


def _pick_sampled(
    logits: mx.array, positions: mx.array, params: Sequence[SamplingParams], token_ids: mx.array | None
) -> mx.array:
    ids = mx.arange(logits.shape[-1]) if token_ids is None else token_ids
    noise = gumbel(_seeds(params), positions, ids)
    columns = mx.argmax(logits * _inverse_temperature(params) + noise, axis=-1)
    return columns if token_ids is None else token_ids[columns]


def _pick_filtered(
    logits: mx.array,
    positions: mx.array,
    params: Sequence[SamplingParams],
    token_ids: mx.array | None,
    exact: bool,
) -> mx.array:
    vocab = logits.shape[-1]
    scaled = logits * _inverse_temperature(params)
    num = min(vocab, NUM_CANDIDATES if exact else NUM_DRAFT_CANDIDATES)
    kept, columns, enough = _filter_best(scaled, params, num)
    if exact and num < vocab and not mx.all(enough).item():
        kept, columns, _ = _filter_best(scaled, params, vocab)
    ids = columns if token_ids is None else token_ids[columns]
    scores = kept + gumbel(_seeds(params), positions, ids)
    best = mx.argmax(scores, axis=-1, keepdims=True)
    return mx.take_along_axis(ids, best, axis=-1)[..., 0]


def _filter_best(
    scaled: mx.array, params: Sequence[SamplingParams], num: int
) -> tuple[mx.array, mx.array, mx.array]:
    """The `num` best columns in order, -inf where the filters drop them, and whether `num` were enough."""
    vocab = scaled.shape[-1]
    columns = _best_columns(scaled, num)
    values = mx.take_along_axis(scaled, columns, axis=-1)  # [rows, n, num], best first

    limits = [min(p.top_k or vocab, vocab) for p in params]
    top_k = mx.array(limits)[:, None, None]
    has_top_k = top_k < vocab
    top_p = mx.array([p.top_p for p in params], mx.float32)[:, None, None]
    floor = mx.log(mx.array([p.min_p for p in params], mx.float32))[:, None, None]  # -inf when off

    best = values[..., :1]
    in_top_k = mx.arange(num) < top_k
    weights = mx.where(in_top_k, mx.exp(values - best), 0)
    if any(p.top_p < 1 and limit == vocab for p, limit in zip(params, limits, strict=True)):
        everything = mx.sum(mx.exp(scaled - best), axis=-1, keepdims=True)
        total = mx.where(has_top_k, mx.sum(weights, axis=-1, keepdims=True), everything)
    else:
        total = mx.sum(weights, axis=-1, keepdims=True)
    reached = mx.cumsum(weights, axis=-1)
    in_top_p = (reached - weights < top_p * total) | (top_p >= 1)
    in_min_p = values >= best + floor
    keep = in_top_k & in_top_p & in_min_p
    keep = keep | (mx.arange(num) == 0)  # rounding never leaves a row without a token
    knows_total = (top_k <= num) | ~has_top_k | (top_p >= 1)  # top_p is a share of what top_k leaves
    enough = (~keep[..., -1] & knows_total[..., 0]) | (num == vocab)
    return mx.where(keep, values, -mx.inf), columns, enough


def _best_columns(scaled: mx.array, num: int) -> mx.array:
    """The `num` best columns, best first; equals in the order of their ids, so that `num` changes nothing."""
    vocab = scaled.shape[-1]
    if num == vocab:
        return mx.argsort(-scaled, axis=-1)
    columns = mx.sort(mx.argpartition(scaled, vocab - num, axis=-1)[..., vocab - num :], axis=-1)
    order = mx.argsort(-mx.take_along_axis(scaled, columns, axis=-1), axis=-1)
    return mx.take_along_axis(columns, order, axis=-1)


def _inverse_temperature(params: Sequence[SamplingParams]) -> mx.array:
    return mx.array([1 / max(p.temperature, LEAST_TEMPERATURE) for p in params], mx.float32)[:, None, None]


def _seeds(params: Sequence[SamplingParams]) -> mx.array:
    seeds = [p.seed for p in params if p.seed is not None]
    if len(seeds) < len(params):
        raise ValueError("a sampled row has no seed: SamplingParams.with_seed() draws one for each request")
    return seed_words(seeds)
