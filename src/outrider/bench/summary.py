"""From rounds to figures: what one arm did at one case, and how arms compare. Pure arithmetic."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.bench.answer import Answer, DraftCounts, Round
from outrider.bench.rounds import Measured
from outrider.bench.statistics import Spread, Weighted, percentile, weighted_percentile
from outrider.bench.workloads import TaskKind


@dataclass(frozen=True)
class Latency:
    p50_s: float | None
    p95_s: float | None


@dataclass(frozen=True)
class ArmFigures:
    arm: str
    num_rounds: int
    num_answers: int
    num_failed: int
    num_stopped: int  # answers that the model ended
    num_tokens: int
    tokens_per_s: Spread | None
    ratios: dict[str, Spread | None]  # of tokens/s, round by round, by baseline
    ttft: Latency
    inter_token: Latency
    stall: Latency  # between arrivals, however many tokens one brings
    pace_by_kind: dict[TaskKind, Latency]  # inter-token, by the kind of row
    stride: float | None
    acceptance: list[float] | None  # by place; None: not known
    peak_bytes: int | None
    cached_share: float | None  # of prompt tokens
    json_valid: tuple[int, int] | None  # (valid, ended) of answers with a schema
    token_sources: list[str]
    errors: dict[str, int]


def token_gaps(answers: Iterable[Answer]) -> list[Weighted]:
    """Seconds a token. Tokens that come together share the time since the arrival before them.

    Those of an answer's first arrival are left out: their time is the time to first token.
    """
    return [
        ((later.s - earlier.s) / later.num_tokens, later.num_tokens)
        for answer in answers
        for earlier, later in zip(answer.arrivals, answer.arrivals[1:], strict=False)
        if later.num_tokens > 0
    ]


def stalls(answers: Iterable[Answer]) -> list[float]:
    """Seconds between two arrivals: how long a reader sees nothing new."""
    return [
        later.s - earlier.s
        for answer in answers
        for earlier, later in zip(answer.arrivals, answer.arrivals[1:], strict=False)
    ]


def figures(measured: Measured, arm: str, baselines: Sequence[str]) -> ArmFigures | None:
    """None: this arm has had no turn yet."""
    rounds = [one for one in measured.rounds if one.arm == arm]
    if not rounds:
        return None
    answers = [answer for one in rounds for answer in one.answers]
    good = [answer for answer in answers if answer.error is None]
    drafts = _drafts(rounds)
    kinds = sorted({answer.kind for answer in good})
    firsts = [answer.ttft_s for answer in good if answer.ttft_s is not None]
    return ArmFigures(
        arm=arm,
        num_rounds=len(rounds),
        num_answers=len(answers),
        num_failed=len(answers) - len(good),
        num_stopped=sum(answer.finish_reason == "stop" for answer in good),
        num_tokens=sum(answer.num_tokens for answer in good),
        tokens_per_s=Spread.of([one.tokens_per_s for one in rounds if not one.has_failed]),
        ratios={name: Spread.of(ratios(measured, arm, name)) for name in baselines},
        ttft=Latency(percentile(firsts, 0.5), percentile(firsts, 0.95)),
        inter_token=_pace(good),
        stall=Latency(percentile(stalls(good), 0.5), percentile(stalls(good), 0.95)),
        pace_by_kind={kind: _pace([a for a in good if a.kind == kind]) for kind in kinds},
        stride=None if drafts is None else drafts.stride,
        acceptance=None if drafts is None else drafts.acceptance,
        peak_bytes=max((one.peak_bytes for one in rounds if one.peak_bytes is not None), default=None),
        cached_share=_cached_share(good),
        json_valid=_json_valid(good),
        token_sources=sorted({answer.token_source for answer in good}),
        errors=dict(Counter(answer.error for answer in answers if answer.error is not None)),
    )


def ratios(measured: Measured, arm: str, baseline: str) -> list[float]:
    """tokens/s of an arm over a baseline's in the same round, for each round that both have behind them."""
    paces: dict[str, dict[int, float]] = {arm: {}, baseline: {}}
    for one in measured.rounds:
        if one.arm in paces and one.tokens_per_s > 0:
            paces[one.arm][one.index] = one.tokens_per_s
    return [pace / paces[baseline][i] for i, pace in paces[arm].items() if i in paces[baseline]]


def same_texts(measured: Measured, arm: str, other: str) -> tuple[int, int]:
    """(equal, compared) answers of two arms to the same question with the same seed."""
    rounds = {(one.arm, one.index): one for one in measured.rounds}
    equal = compared = 0
    for (name, index), one in rounds.items():
        counterpart = rounds.get((other, index))
        if name != arm or counterpart is None:
            continue
        for mine, theirs in zip(one.answers, counterpart.answers, strict=True):
            if mine.error is None and theirs.error is None:
                compared += 1
                equal += mine.text == theirs.text
    return equal, compared


def _pace(answers: Sequence[Answer]) -> Latency:
    gaps = token_gaps(answers)
    return Latency(weighted_percentile(gaps, 0.5), weighted_percentile(gaps, 0.95))


def _drafts(rounds: Sequence[Round]) -> DraftCounts | None:
    told = [one.drafts for one in rounds if one.drafts is not None]
    return sum(told, DraftCounts()) if told else None


def _cached_share(answers: Sequence[Answer]) -> float | None:
    told = [answer for answer in answers if answer.num_prompt and answer.num_cached is not None]
    if not told:
        return None
    return sum(a.num_cached or 0 for a in told) / sum(a.num_prompt or 0 for a in told)


def _json_valid(answers: Sequence[Answer]) -> tuple[int, int] | None:
    ended = [answer for answer in answers if answer.kind == "constrained" and answer.finish_reason == "stop"]
    return (sum(_is_json(answer.text) for answer in ended), len(ended)) if ended else None


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
