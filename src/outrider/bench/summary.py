"""From rounds to figures: one variant at one case, and the comparison of variants. Pure arithmetic."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from outrider.bench.answer import Answer, DraftCounts, RoundResult, TokenArrival
from outrider.bench.rounds import CaseResult
from outrider.bench.statistics import Spread, Weighted, percentile, weighted_percentile
from outrider.bench.workloads import TaskKind


@dataclass(frozen=True)
class Latency:
    p50_s: float | None
    p95_s: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Latency:
        return cls(percentile(values, 0.5), percentile(values, 0.95))

    @classmethod
    def per_token(cls, answers: Iterable[Answer]) -> Latency:
        gaps = token_gaps(answers)
        return cls(weighted_percentile(gaps, 0.5), weighted_percentile(gaps, 0.95))


@dataclass(frozen=True)
class VariantFigures:
    """The names of the fields, except `variant`, are keys of the record's JSON."""

    variant: str
    num_rounds: int
    num_answers: int
    num_failed: int
    num_stopped: int  # answers that the model ended
    num_tokens: int
    tokens_per_s: Spread | None
    ratios: dict[str, Spread | None]  # by baseline: tokens/s over the baseline's tokens/s in the same round
    ttft: Latency
    ttft_ratios: dict[str, Spread | None]  # by baseline: mean TTFT over the baseline's in the same round
    inter_token: Latency
    stall: Latency  # between two arrivals, whatever number of tokens arrives
    pace_by_kind: dict[TaskKind, Latency]  # inter-token latency by the kind of row
    ttft_by_kind: dict[TaskKind, Latency]
    longest_stall_by_kind: dict[TaskKind, float | None]  # seconds
    stride: float | None
    acceptance: list[float] | None  # by position in the draft; None if not known
    peak_bytes: int | None
    cached_share: float | None  # of prompt tokens
    json_valid: tuple[int, int] | None  # (valid, ended by the model) of answers with a schema
    token_sources: list[str]
    errors: dict[str, int]


def token_gaps(answers: Iterable[Answer]) -> list[Weighted]:
    """Seconds per token, and tokens as weights. Tokens that arrive together share the time before them.

    The tokens of an answer's first arrival are left out: their time is the time to first token.
    """
    return [
        ((later.s - earlier.s) / later.num_tokens, later.num_tokens)
        for earlier, later in _arrival_pairs(answers)
        if later.num_tokens > 0
    ]


def stalls(answers: Iterable[Answer]) -> list[float]:
    """Seconds between two arrivals: no new text arrives in this time."""
    return [later.s - earlier.s for earlier, later in _arrival_pairs(answers)]


def figures(result: CaseResult, variant: str, baselines: Sequence[str]) -> VariantFigures | None:
    """None if the variant has no round yet."""
    rounds = [one for one in result.rounds if one.variant == variant]
    if not rounds:
        return None
    answers = [answer for one in rounds for answer in one.answers]
    good = [answer for answer in answers if answer.error is None]
    known = [one.drafts for one in rounds if one.drafts is not None]
    drafts = sum(known, DraftCounts()) if known else None
    kinds = sorted({answer.kind for answer in good})
    return VariantFigures(
        variant=variant,
        num_rounds=len(rounds),
        num_answers=len(answers),
        num_failed=len(answers) - len(good),
        num_stopped=sum(answer.finish_reason == "stop" for answer in good),
        num_tokens=sum(answer.num_tokens for answer in good),
        tokens_per_s=Spread.of([one.tokens_per_s for one in rounds if not one.has_failed]),
        ratios={name: Spread.of(ratios(result, variant, name)) for name in baselines},
        ttft=_ttft(good),
        ttft_ratios={name: Spread.of(ttft_ratios(result, variant, name)) for name in baselines},
        inter_token=Latency.per_token(good),
        stall=Latency.of(stalls(good)),
        pace_by_kind={kind: Latency.per_token([a for a in good if a.kind == kind]) for kind in kinds},
        ttft_by_kind={kind: _ttft(a for a in good if a.kind == kind) for kind in kinds},
        longest_stall_by_kind={
            kind: max(stalls(a for a in good if a.kind == kind), default=None) for kind in kinds
        },
        stride=None if drafts is None else drafts.stride,
        acceptance=None if drafts is None else drafts.acceptance,
        peak_bytes=max((one.peak_bytes for one in rounds if one.peak_bytes is not None), default=None),
        cached_share=_cached_share(good),
        json_valid=_json_valid(good),
        token_sources=sorted({answer.token_source for answer in good}),
        errors=dict(Counter(answer.error for answer in answers if answer.error is not None)),
    )


def _ttft(answers: Iterable[Answer]) -> Latency:
    return Latency.of([answer.ttft_s for answer in answers if answer.ttft_s is not None])


def ratios(result: CaseResult, variant: str, baseline: str) -> list[float]:
    """tokens/s of the variant over the baseline's, for each round that both have finished."""
    return _ratios(result, variant, baseline, lambda one: one.tokens_per_s)


def ttft_ratios(result: CaseResult, variant: str, baseline: str) -> list[float]:
    """Mean time to first token of the variant over the baseline's, for each round that both have finished."""
    return _ratios(result, variant, baseline, lambda one: one.mean_ttft_s)


def _ratios(
    result: CaseResult, variant: str, baseline: str, figure: Callable[[RoundResult], float | None]
) -> list[float]:
    found: dict[str, dict[int, float]] = {variant: {}, baseline: {}}
    for one in result.rounds:
        if one.variant in found and (value := figure(one)):
            found[one.variant][one.index] = value
    own, others = found[variant], found[baseline]
    return [value / others[index] for index, value in own.items() if index in others]


def same_texts(result: CaseResult, variant: str, other: str) -> tuple[int, int]:
    """(equal, compared) answers of two variants to the same questions with the same seeds."""
    rounds = {(one.variant, one.index): one for one in result.rounds}
    equal = compared = 0
    for (name, index), one in rounds.items():
        counterpart = rounds.get((other, index))
        if name != variant or counterpart is None:
            continue
        for a, b in zip(one.answers, counterpart.answers, strict=True):
            if a.error is None and b.error is None:
                compared += 1
                equal += a.text == b.text
    return equal, compared


def _arrival_pairs(answers: Iterable[Answer]) -> Iterator[tuple[TokenArrival, TokenArrival]]:
    for answer in answers:
        yield from pairwise(answer.arrivals)


def _cached_share(answers: Sequence[Answer]) -> float | None:
    known = [answer for answer in answers if answer.num_prompt and answer.num_cached is not None]
    if not known:
        return None
    return sum(a.num_cached or 0 for a in known) / sum(a.num_prompt or 0 for a in known)


def _json_valid(answers: Sequence[Answer]) -> tuple[int, int] | None:
    ended = [answer for answer in answers if answer.kind == "constrained" and answer.finish_reason == "stop"]
    return (sum(_is_json(answer.text) for answer in ended), len(ended)) if ended else None


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
