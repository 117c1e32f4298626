"""The measurements of one answer, and of all answers of one round. Pure data; the client took the times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from outrider.bench.workloads import TaskKind

TokenSource = Literal["engine", "usage", "chunks"]  # how the tokens of an answer were counted


@dataclass(frozen=True, slots=True)
class TokenArrival:
    """Tokens that arrived together."""

    s: float  # seconds since the request was sent
    num_tokens: float  # an estimate with a fraction if only the answer's total is known


@dataclass(frozen=True)
class Answer:
    kind: TaskKind
    started_s: float
    ended_s: float
    arrivals: tuple[TokenArrival, ...] = ()
    num_tokens: int = 0
    token_source: TokenSource = "engine"
    finish_reason: str | None = None
    text: str = ""
    num_prompt: int | None = None
    num_cached: int | None = None  # prompt tokens that came from a prefix cache
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return self.arrivals[0].s if self.arrivals else None


@dataclass(frozen=True)
class DraftCounts:
    """Decode steps of a target and their drafts, since the target started or within a round."""

    num_steps: int = 0  # one for each row of each decode step
    num_tokens: int = 0  # committed in these steps
    drafted: tuple[int, ...] = ()  # by position in the draft
    accepted: tuple[int, ...] = ()  # by position in the draft

    @property
    def stride(self) -> float | None:
        return self.num_tokens / self.num_steps if self.num_steps else None

    @property
    def acceptance(self) -> list[float]:
        """Share of accepted drafts, by position, for the positions that were drafted."""
        return [a / d for d, a in zip(self.drafted, self.accepted, strict=True) if d]

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return self._combined(other, 1)

    def __sub__(self, earlier: DraftCounts) -> DraftCounts:
        return self._combined(earlier, -1)

    def _combined(self, other: DraftCounts, sign: int) -> DraftCounts:
        return DraftCounts(
            self.num_steps + sign * other.num_steps,
            self.num_tokens + sign * other.num_tokens,
            _added(self.drafted, other.drafted, sign),
            _added(self.accepted, other.accepted, sign),
        )


@dataclass(frozen=True)
class RoundResult:
    """One round of one variant at one case: all answers, and the time that they took together."""

    variant: str
    index: int
    place: int  # 0 if the variant was the first of its round, 1 if it was the second, ...
    seconds: float  # from the first request to the end of the last answer
    answers: tuple[Answer, ...]
    drafts: DraftCounts | None = None  # None if the target does not report them
    peak_bytes: int | None = None

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers if answer.error is None)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def mean_ttft_s(self) -> float | None:
        """None if no answer had a token."""
        known = [answer.ttft_s for answer in self.answers if answer.ttft_s is not None]
        return sum(known) / len(known) if known else None

    @property
    def has_failed(self) -> bool:
        """True if every request failed."""
        return all(answer.error is not None for answer in self.answers)


def _added(one: Sequence[int], other: Sequence[int], sign: int) -> tuple[int, ...]:
    length = max(len(one), len(other))
    padded = ([*values, *[0] * (length - len(values))] for values in (one, other))
    return tuple(a + sign * b for a, b in zip(*padded, strict=True))
