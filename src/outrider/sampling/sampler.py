"""The sampler: the one rule that turns logits into tokens, for targets and for drafts alike.

    token at p = argmax over the filtered tokens of  logits / temperature + gumbel(seed, p, token)

Greedy rows are the case without noise. On CPUs a native operation draws the tokens (cpu/sampling.py).

Elsewhere a row with filters looks at its best NUM_CANDIDATES tokens first. If a filter may leave more tokens
than that, the sampler checks the result on the host and, if the candidates were too few, looks at the whole
vocabulary. A traced pass cannot wait for that check: there such a row looks at the whole vocabulary at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import mlx.core as mx

from outrider.cpu import sampling as cpu_sampling
from outrider.cpu.top_two import best, top_two
from outrider.request import NUM_CANDIDATES, SamplingParams
from outrider.sampling.noise import gumbel, seed_words

NUM_DRAFT_CANDIDATES = 128  # of a filtered draft; chosen by hand: too few cost speed, never a wrong token
MIN_TEMPERATURE = 1e-30  # so that 1 / temperature stays finite in float32; noise has no effect far above this

Kind = Literal["greedy", "random", "filtered", "wide"]


@dataclass(frozen=True)
class Sampler:
    """Samples for all rows of a batch: rows of one kind are a group, and each group is computed at once.

    Everything that differs from request to request is in arrays, so that one trace serves many batches. Even
    the row numbers of each group are in arrays.
    """

    num_rows: int
    groups: tuple[_Group, ...]
    restore: mx.array | None = None  # [rows] index of each row in the groups' results, one after the other

    @classmethod
    def of(cls, params: Sequence[SamplingParams], for_trace: bool = False) -> Sampler:
        """`for_trace`: as few groups as possible, and nothing that the host has to read half-way.

        Greedy rows then join the random or filtered rows with a noise weight of 0. They do not join "wide"
        rows, which sort the whole vocabulary.
        """
        kinds = [_kind(p, for_trace) for p in params]
        joined: Kind = "random" if "random" in kinds else "filtered" if "filtered" in kinds else "greedy"
        rows: dict[Kind, list[int]] = {}
        for row, kind in enumerate(kinds):
            rows.setdefault(joined if for_trace and kind == "greedy" else kind, []).append(row)
        order = sorted(rows)
        groups = [_Group.of(kind, [params[row] for row in rows[kind]], for_trace) for kind in order]
        if len(groups) < 2:
            return cls(len(params), tuple(groups))
        groups = [replace(group, index=mx.array(rows[group.kind])) for group in groups]
        grouped = [row for kind in order for row in rows[kind]]
        restore = mx.array(sorted(range(len(grouped)), key=grouped.__getitem__))
        return cls(len(params), tuple(groups), restore)

    @property
    def key(self) -> Hashable:
        """Everything except the arrays."""
        return self.num_rows, tuple(group.key for group in self.groups)

    @property
    def arrays(self) -> dict[str, Any]:
        named: dict[str, Any] = {group.kind: group.arrays for group in self.groups}
        return named if self.restore is None else named | {"restore": self.restore}

    def with_arrays(self, arrays: Mapping[str, Any]) -> Sampler:
        groups = tuple(group.with_arrays(arrays[group.kind]) for group in self.groups)
        return replace(self, groups=groups, restore=arrays.get("restore"))

    def native_numbers(self) -> list[mx.array] | None:
        """What native operations draw by, for all rows; none if all rows take the best token.

        None: the rows are of several kinds, or the pass is traced.
        """
        if len(self.groups) != 1 or not self.groups[0].may_read:
            return None
        return cpu_sampling.ordered(self.groups[0].numbers)

    def sample(self, logits: mx.array, positions: mx.array) -> mx.array:
        """The target tokens.  logits [rows, n, vocab], positions [rows, n] -> token ids [rows, n]"""
        return self._sample(logits, positions, None, is_draft=False)

    def sample_drafts(self, logits: mx.array, positions: mx.array, token_ids: mx.array | None) -> mx.array:
        """Draft tokens by the same rule and the same noise.

        token_ids [vocab] names the columns of the logits if the draft vocabulary is a reduced one.
        """
        return self._sample(logits, positions, token_ids, is_draft=True)

    def sample_drafts_with_margins(
        self, logits: mx.array, positions: mx.array, token_ids: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        """Draft tokens, and by how much each one's score (logit and noise) exceeds the second best score.

        The model's scores differ from the head's. The larger the margin, the more likely both choose the
        same token.
        """
        found = [
            group.sample_with_margin(*self._part(group, logits, positions), token_ids)
            for group in self.groups
        ]
        drafts, margins = ([*parts] for parts in zip(*found, strict=True))
        return self._joined(drafts), self._joined(margins)

    def _sample(
        self, logits: mx.array, positions: mx.array, token_ids: mx.array | None, is_draft: bool
    ) -> mx.array:
        return self._joined(
            [
                group.sample(*self._part(group, logits, positions), token_ids, is_draft)
                for group in self.groups
            ]
        )

    def _part(self, group: _Group, logits: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        return (logits, positions) if group.index is None else (logits[group.index], positions[group.index])

    def _joined(self, found: list[mx.array]) -> mx.array:
        """The groups' results in the order of the rows."""
        return found[0] if self.restore is None else mx.concatenate(found)[self.restore]


def _kind(params: SamplingParams, for_trace: bool) -> Kind:
    if params.is_greedy:
        return "greedy"
    if not params.is_filtered:
        return "random"
    return "wide" if for_trace and params.filters_widely else "filtered"


@dataclass(frozen=True)
class _Group:
    """Rows of one kind.

    `numbers` holds, unless the rows are all greedy: inverse_temperature [rows, 1, 1] and seeds [rows, 2]; for
    rows with filters top_k, top_p and log_min_p, each [rows, 1, 1]; and noise_weight [rows, 1, 1] if greedy
    rows have joined.
    """

    kind: Kind
    num_rows: int
    numbers: Mapping[str, mx.array]
    needs_total: bool = False  # a row's top_p is a share of the whole vocabulary
    is_wide: bool = False  # for some row the best candidates may be too few
    may_read: bool = True  # the host may check that; False: such rows look at the whole vocabulary
    index: mx.array | None = None  # [rows] the group's rows in the batch; None: the whole batch

    @classmethod
    def of(cls, kind: Kind, params: Sequence[SamplingParams], for_trace: bool) -> _Group:
        if kind == "greedy":
            return cls(kind, len(params), {})
        factors = [1.0 if p.is_greedy else 1 / max(p.temperature, MIN_TEMPERATURE) for p in params]
        numbers = {"inverse_temperature": _column(factors), "seeds": _seeds(params)}
        if kind in ("filtered", "wide"):
            top_k = [1 if p.is_greedy else min(p.top_k, 2**30) for p in params]
            numbers["top_k"] = mx.array([[[number]] for number in top_k])
            numbers["top_p"] = _column(p.top_p for p in params)
            numbers["log_min_p"] = mx.log(_column(p.min_p for p in params))  # -inf when off
        if any(p.is_greedy for p in params):
            numbers["noise_weight"] = _column(0.0 if p.is_greedy else 1.0 for p in params)
        random = [p for p in params if not p.is_greedy]
        return cls(
            kind,
            len(params),
            numbers,
            needs_total=any(p.top_p < 1 and not 0 < p.top_k <= NUM_CANDIDATES for p in random),
            is_wide=any(p.filters_widely for p in random),
            may_read=not for_trace,
        )

    @property
    def key(self) -> Hashable:
        has_greedy = "noise_weight" in self.numbers
        return self.kind, self.num_rows, self.needs_total, self.is_wide, self.may_read, has_greedy

    @property
    def arrays(self) -> dict[str, mx.array]:
        return dict(self.numbers) if self.index is None else {**self.numbers, "index": self.index}

    def with_arrays(self, arrays: Mapping[str, mx.array]) -> _Group:
        numbers = {name: arrays[name] for name in self.numbers}
        return replace(self, numbers=numbers, index=arrays.get("index"))

    def sample(
        self, logits: mx.array, positions: mx.array, token_ids: mx.array | None, is_draft: bool
    ) -> mx.array:
        if (drawn := self._drawn(logits, positions, token_ids, wants_margins=False)) is not None:
            return drawn[0]
        scores, ids = self._scores(logits, positions, token_ids, is_draft)
        return _token_ids(best(scores), ids)

    def sample_with_margin(
        self, logits: mx.array, positions: mx.array, token_ids: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        if (drawn := self._drawn(logits, positions, token_ids, wants_margins=True)) is not None:
            return drawn
        scores, ids = self._scores(logits, positions, token_ids, is_draft=True)
        columns, margins = top_two(scores)
        return _token_ids(columns, ids), margins

    def _drawn(
        self, logits: mx.array, positions: mx.array, token_ids: mx.array | None, wants_margins: bool
    ) -> tuple[mx.array, mx.array] | None:
        """The tokens and their margins by the native operation. None: this group needs another way."""
        if self.kind == "greedy" or not self.may_read:
            return None
        return cpu_sampling.draw(logits, positions, self.numbers, token_ids, wants_margins)

    def _scores(
        self, logits: mx.array, positions: mx.array, token_ids: mx.array | None, is_draft: bool
    ) -> tuple[mx.array, mx.array | None]:
        """The scores of which the greatest is chosen, and the token ids of their columns (None: 0, 1, ..)."""
        if self.kind == "greedy":
            return logits, token_ids
        scaled = logits * self.numbers["inverse_temperature"]
        if self.kind == "random":
            ids = mx.arange(logits.shape[-1]) if token_ids is None else token_ids
            return scaled + self._noise(positions, ids), token_ids
        scores, columns = self._filter(scaled, is_draft)
        ids = columns if token_ids is None else token_ids[columns]
        return scores + self._noise(positions, ids), ids

    def _noise(self, positions: mx.array, ids: mx.array) -> mx.array:
        noise = gumbel(self.numbers["seeds"], positions, ids)
        weight = self.numbers.get("noise_weight")
        return noise if weight is None else noise * weight

    def _filter(self, scaled: mx.array, is_draft: bool) -> tuple[mx.array, mx.array]:
        """The scores of the best columns, -inf where a filter drops one, and these columns."""
        vocab = scaled.shape[-1]
        num = min(vocab, NUM_DRAFT_CANDIDATES if is_draft else NUM_CANDIDATES)
        may_be_few = not is_draft and num < vocab and self.is_wide
        if may_be_few and not self.may_read:
            num = vocab
        scores, columns, is_enough = _filter_best(scaled, self.numbers, num, self.needs_total)
        if may_be_few and self.may_read and not mx.all(is_enough).item():
            scores, columns, _ = _filter_best(scaled, self.numbers, vocab, self.needs_total)
        return scores, columns


def _filter_best(
    scaled: mx.array, numbers: Mapping[str, mx.array], num: int, needs_total: bool
) -> tuple[mx.array, mx.array, mx.array]:
    """The `num` best columns in order, -inf where the filters drop them, and whether `num` were enough."""
    vocab = scaled.shape[-1]
    columns = _best_columns(scaled, num)
    values = mx.take_along_axis(scaled, columns, axis=-1)  # [rows, n, num], best first

    given, top_p = numbers["top_k"], numbers["top_p"]
    top_k = mx.where(given > 0, mx.minimum(given, vocab), vocab)
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
    in_min_p = values >= best + numbers["log_min_p"]
    keep = in_top_k & in_top_p & in_min_p
    keep = keep | (mx.arange(num) == 0)  # rounding never leaves a row without a token
    knows_total = (top_k <= num) | ~has_top_k | (top_p >= 1)  # top_p is a share of what top_k leaves
    is_enough = (~keep[..., -1] & knows_total[..., 0]) | (num == vocab)
    return mx.where(keep, values, -mx.inf), columns, is_enough


def _best_columns(scaled: mx.array, num: int) -> mx.array:
    """The `num` best columns, best first. Equal scores are in the order of their ids, for every `num`."""
    vocab = scaled.shape[-1]
    if num == vocab:
        return mx.argsort(-scaled, axis=-1)
    columns = mx.sort(mx.argpartition(scaled, vocab - num, axis=-1)[..., vocab - num :], axis=-1)
    order = mx.argsort(-mx.take_along_axis(scaled, columns, axis=-1), axis=-1)
    return mx.take_along_axis(columns, order, axis=-1)


def _token_ids(columns: mx.array, ids: mx.array | None) -> mx.array:
    """[rows, n] columns to token ids. `ids` are of all rows [columns] or of each one [rows, n, columns]."""
    if ids is None:
        return columns.astype(mx.int32)
    if ids.ndim == 1:
        return ids[columns].astype(mx.int32)
    return mx.take_along_axis(ids, columns[..., None], axis=-1)[..., 0].astype(mx.int32)


def _column(numbers: Any) -> mx.array:
    """[rows, 1, 1]"""
    return mx.array([[[number]] for number in numbers], mx.float32)


def _seeds(params: Sequence[SamplingParams]) -> mx.array:
    seeds = [0 if p.is_greedy else p.seed for p in params]
    if None in seeds:
        raise ValueError("a random row has no seed: SamplingParams.with_seed() makes one for each request")
    return seed_words([seed for seed in seeds if seed is not None])
