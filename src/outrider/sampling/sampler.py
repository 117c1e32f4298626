"""Sampler: the one rule that turns logits into tokens, for targets and for drafts alike.

    token at p = argmax over the tokens the filters leave of  logits / temperature + gumbel(seed, p, token)

Greedy rows are the case without noise. Rows that filter look at their best candidates only; whether those
were enough is checked, and if they were not, the whole vocabulary is looked at. (At once, where a pass must
not wait for the check.)
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from outrider.request import NUM_CANDIDATES, SamplingParams
from outrider.sampling.noise import gumbel, seed_words

NUM_DRAFT_CANDIDATES = 128
LEAST_TEMPERATURE = (
    1e-30  # below it float32 would overflow; far above it the noise has long stopped to matter
)


@dataclass(frozen=True)
class Sampler:
    """How the rows of a batch pick: greedy, sampled and filtered ones, each kind at once.

    What differs from request to request is in arrays, so that a compiled pass serves them all; even which
    rows are of which kind.
    """

    num_rows: int
    kinds: tuple[_RowGroup, ...]
    back: mx.array | None = None  # [rows] where the kinds' picks, one after the other, have each row's

    @classmethod
    def of(cls, params: Sequence[SamplingParams], merged: bool = False) -> Sampler:
        """`merged`: fewer kinds rather than less work, and nothing that is read half-way.

        Greedy rows go with others, their noise times zero; but not with those that sort the vocabulary.
        """
        names = [_kind_of(p, merged) for p in params]
        company = next((name for name in ("sampled", "filtered") if name in names), "greedy")
        kinds: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            kinds.setdefault(company if merged and name == "greedy" else name, []).append(row)
        made = [
            _RowGroup.of(name, [params[row] for row in kinds[name]], merged, mx.array(kinds[name]))
            for name in sorted(kinds)
        ]
        if len(made) < 2:
            return cls(len(params), tuple(replace(kind, index=None) for kind in made))
        order = [row for name in sorted(kinds) for row in kinds[name]]
        back = mx.array(sorted(range(len(order)), key=order.__getitem__))
        return cls(len(params), tuple(made), back)

    @property
    def key(self) -> Hashable:
        """All of it but the arrays."""
        return self.num_rows, tuple(kind.key for kind in self.kinds)

    @property
    def arrays(self) -> list[list[mx.array]]:
        back = [] if self.back is None else [[self.back]]
        return [*(kind.arrays for kind in self.kinds), *back]

    def with_arrays(self, arrays: Sequence[list[mx.array]]) -> Sampler:
        kinds = tuple(kind.with_arrays(own) for kind, own in zip(self.kinds, arrays, strict=False))
        return replace(self, kinds=kinds, back=None if self.back is None else arrays[-1][0])

    def pick(
        self, logits: mx.array, positions: mx.array, token_ids: mx.array | None, exact: bool
    ) -> mx.array:
        parts = []
        for kind in self.kinds:
            index = kind.index
            part = (logits, positions) if index is None else (logits[index], positions[index])
            parts.append(kind.pick(*part, token_ids, exact).astype(mx.int32))
        return parts[0] if self.back is None else mx.concatenate(parts)[self.back]


def _kind_of(params: SamplingParams, merged: bool) -> str:
    if params.is_greedy:
        return "greedy"
    if not params.is_filtered:
        return "sampled"
    return "wide" if merged and params.filters_widely else "filtered"


def pick(logits: mx.array, positions: mx.array, how: Sampler) -> mx.array:
    """The target tokens.  logits [rows, n, vocab], positions [rows, n] of the picked tokens -> [rows, n]"""
    return how.pick(logits, positions, None, exact=True)


def pick_drafts(logits: mx.array, positions: mx.array, how: Sampler, token_ids: mx.array | None) -> mx.array:
    """Draft tokens by the same rule and noise. A draft may be wrong, so it never looks at many candidates.

    token_ids [vocab] names the columns of the logits when the draft vocabulary is a reduced one.
    """
    return how.pick(logits, positions, token_ids, exact=False)


@dataclass(frozen=True)
class _RowGroup:
    """Rows that pick alike."""

    name: str
    num_rows: int
    numbers: list[mx.array]  # inverse temperature [rows, 1, 1], seeds [rows, 2]; the filters' [rows, 1, 1]
    needs_total: bool = False  # a share of the whole vocabulary is asked for
    is_wide: bool = False  # the best candidates may not be enough
    reads: bool = True  # whether they were is looked at; else all columns are
    has_greedy: bool = False  # greedy rows are among them: the noise has weights, the last of the numbers
    index: mx.array | None = None  # [rows] which rows of the batch they are; None: all

    @classmethod
    def of(cls, name: str, params: Sequence[SamplingParams], merged: bool, index: mx.array) -> _RowGroup:
        if name == "greedy":
            return cls(name, len(params), [], index=index)
        greedy = [p.is_greedy for p in params]
        numbers = [_column([_inverse_temperature(p) for p in params]), _seeds(params)]
        if name in ("filtered", "wide"):
            limits = [1 if p.is_greedy else min(p.top_k, 2**30) for p in params]
            numbers.append(mx.array(limits)[:, None, None])
            numbers.append(_column([p.top_p for p in params]))
            numbers.append(mx.log(_column([p.min_p for p in params])))  # -inf when off
        if any(greedy):
            numbers.append(_column([0.0 if is_greedy else 1.0 for is_greedy in greedy]))
        sampled = [p for p in params if not p.is_greedy]
        needs_total = any(p.top_p < 1 and not 0 < p.top_k <= NUM_CANDIDATES for p in sampled)
        is_wide = any(p.filters_widely for p in sampled)
        return cls(name, len(params), numbers, needs_total, is_wide, not merged, any(greedy), index)

    @property
    def key(self) -> Hashable:
        return self.name, self.num_rows, self.needs_total, self.is_wide, self.reads, self.has_greedy

    @property
    def arrays(self) -> list[mx.array]:
        return self.numbers if self.index is None else [*self.numbers, self.index]

    def with_arrays(self, arrays: list[mx.array]) -> _RowGroup:
        if self.index is None:
            return replace(self, numbers=arrays)
        return replace(self, numbers=arrays[:-1], index=arrays[-1])

    def pick(
        self, logits: mx.array, positions: mx.array, token_ids: mx.array | None, exact: bool
    ) -> mx.array:
        if self.name == "greedy":
            columns = mx.argmax(logits, axis=-1)
            return columns if token_ids is None else token_ids[columns]
        inverse_temperature, seeds, *filters = self.numbers
        weight = filters.pop() if self.has_greedy else None

        def noise(ids: mx.array) -> mx.array:
            full = gumbel(seeds, positions, ids)
            return full if weight is None else full * weight

        scaled = logits * inverse_temperature
        if self.name == "sampled":
            ids = mx.arange(logits.shape[-1]) if token_ids is None else token_ids
            columns = mx.argmax(scaled + noise(ids), axis=-1)
            return columns if token_ids is None else token_ids[columns]
        kept, columns = self._filtered(scaled, filters, exact)
        ids = columns if token_ids is None else token_ids[columns]
        best = mx.argmax(kept + noise(ids), axis=-1, keepdims=True)
        return mx.take_along_axis(ids, best, axis=-1)[..., 0]

    def _filtered(
        self, scaled: mx.array, filters: Sequence[mx.array], exact: bool
    ) -> tuple[mx.array, mx.array]:
        vocab = scaled.shape[-1]
        num = min(vocab, NUM_CANDIDATES if exact else NUM_DRAFT_CANDIDATES)
        has_doubts = exact and num < vocab and self.is_wide
        if has_doubts and not self.reads:
            num = vocab
        kept, columns, enough = _filter_best(scaled, filters, num, self.needs_total)
        if has_doubts and self.reads and not mx.all(enough).item():
            kept, columns, _ = _filter_best(scaled, filters, vocab, self.needs_total)
        return kept, columns


def _filter_best(
    scaled: mx.array, filters: Sequence[mx.array], num: int, needs_total: bool
) -> tuple[mx.array, mx.array, mx.array]:
    """The `num` best columns in order, -inf where the filters drop them, and whether `num` were enough."""
    vocab = scaled.shape[-1]
    columns = _best_columns(scaled, num)
    values = mx.take_along_axis(scaled, columns, axis=-1)  # [rows, n, num], best first

    wanted, top_p, floor = filters
    top_k = mx.where(wanted > 0, mx.minimum(wanted, vocab), vocab)
    has_top_k = top_k < vocab

    best = values[..., :1]
    in_top_k = mx.arange(num) < top_k
    weights = mx.where(in_top_k, mx.exp(values - best), 0)
    total = mx.sum(weights, axis=-1, keepdims=True)
    if needs_total or vocab <= NUM_CANDIDATES:
        everything = mx.sum(mx.exp(scaled - best), axis=-1, keepdims=True)
        total = mx.where(has_top_k, total, everything)
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


def _column(numbers: list[float]) -> mx.array:
    return mx.array(numbers, mx.float32)[:, None, None]


def _inverse_temperature(params: SamplingParams) -> float:
    return 1.0 if params.is_greedy else 1 / max(params.temperature, LEAST_TEMPERATURE)


def _seeds(params: Sequence[SamplingParams]) -> mx.array:
    seeds = [0 if p.is_greedy else p.seed for p in params]
    if None in seeds:
        raise ValueError("a sampled row has no seed: SamplingParams.with_seed() draws one for each request")
    return seed_words([seed for seed in seeds if seed is not None])
