"""What was seen of one answer, and of all answers of one round. Pure data; times are the client's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from outrider.bench.workloads import TaskKind

TokenSource = Literal["engine", "usage", "chunks"]  # who counted an answer's tokens


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens that came together, so long after the request."""

    s: float
    num_tokens: float  # a share, where only the sum of an answer is known


@dataclass(frozen=True)
class Answer:
    kind: TaskKind
    started_s: float
    ended_s: float
    arrivals: tuple[Arrival, ...] = ()
    num_tokens: int = 0
    token_source: TokenSource = "engine"
    finish_reason: str | None = None
    text: str = ""
    num_prompt: int | None = None
    num_cached: int | None = None  # prompt tokens that were not computed again
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return self.arrivals[0].s if self.arrivals else None


@dataclass(frozen=True)
class DraftCounts:
    """What a target's decode steps did, since it started or within a round."""

    num_steps: int = 0  # rows over all decode steps
    num_tokens: int = 0  # that they committed
    drafted: tuple[int, ...] = ()  # by place in the draft
    accepted: tuple[int, ...] = ()

    @property
    def stride(self) -> float | None:
        return self.num_tokens / self.num_steps if self.num_steps else None

    @property
    def acceptance(self) -> list[float]:
        """Share of drafts that stood, by place, as far as there were any."""
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
class Round:
    """One arm's turn at a case: every answer, and how long all of them took together."""

    arm: str
    index: int
    place: int  # in the order of turns of this round
    seconds: float  # from the first request to the last answer's end
    answers: tuple[Answer, ...]
    drafts: DraftCounts | None = None  # None: the target does not tell
    peak_bytes: int | None = None

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers if answer.error is None)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def has_failed(self) -> bool:
        """No answer came."""
        return all(answer.error is not None for answer in self.answers)


def _added(one: Sequence[int], other: Sequence[int], sign: int) -> tuple[int, ...]:
    length = max(len(one), len(other))
    padded = ([*values, *[0] * (length - len(values))] for values in (one, other))
    return tuple(a + sign * b for a, b in zip(*padded, strict=True))
