"""Rounds and targets for tests: every figure in them is known."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outrider.bench.answer import Answer, DraftCounts, RoundResult, TokenArrival
from outrider.bench.rounds import Case, CaseResult
from outrider.bench.target import RequestOptions
from outrider.bench.workloads import WORKLOADS, Task


def answer(*arrivals: tuple[float, float], **changes: Any) -> Answer:
    """Its tokens came at these times: (seconds, tokens)."""
    came = tuple(TokenArrival(s, tokens) for s, tokens in arrivals)
    usual: dict[str, Any] = {
        "kind": "free",
        "started_s": 0.0,
        "ended_s": came[-1].s if came else 0.0,
        "arrivals": came,
        "num_tokens": round(sum(one.num_tokens for one in came)),
        "finish_reason": "stop",
    }
    return Answer(**(usual | changes))


def a_round(variant: str, index: int, tokens_per_s: float, **changes: Any) -> RoundResult:
    """Ten tokens in one answer, at this pace."""
    seconds = 10 / tokens_per_s
    usual: dict[str, Any] = {
        "place": 0,
        "seconds": seconds,
        "answers": (answer((seconds / 2, 2), (seconds, 8)),),
    }
    return RoundResult(variant, index, **(usual | changes))


def result(
    *rounds: RoundResult, workload: str = "chat", streams: int = 1, temperature: float = 0.0
) -> CaseResult:
    return CaseResult(Case(WORKLOADS[workload], streams, temperature), list(rounds))


@dataclass
class FakeTarget:
    """Answers each request at once with one token, unless told otherwise, and stores the requests."""

    name: str = "fake"
    can_draft: bool = True
    memory_source: str | None = "make-believe"
    pause_s: float = 0.0
    fails: Callable[[Task], str | None] = lambda task: None
    asked: list[tuple[Task, RequestOptions]] = field(default_factory=list)
    num_live: int = 0
    most_live: int = 0
    events: list[str] = field(default_factory=list)  # shared with other targets, to see the order of requests

    def facts(self) -> dict[str, Any]:
        return {"kind": "fake", "model": "none"}

    async def ask(self, task: Task, options: RequestOptions) -> Answer:
        self.asked.append((task, options))
        self.events.append(f"{self.name} {options.depth}")
        self.num_live += 1
        self.most_live = max(self.most_live, self.num_live)
        started_s = time.perf_counter()
        await asyncio.sleep(self.pause_s)
        self.num_live -= 1
        now_s = time.perf_counter()
        error = self.fails(task)
        if error is not None:
            return Answer(task.kind, started_s, now_s, error=error)
        came = (TokenArrival(now_s - started_s, 1),)
        return Answer(task.kind, started_s, now_s, came, 1, finish_reason="stop", text=task.prompt)

    async def draft_counts(self) -> DraftCounts:
        count = len(self.asked)
        return DraftCounts(count, 2 * count, (count, count), (count, 0))

    def reset_peak(self) -> None:
        self.events.append("reset")

    def peak_bytes(self) -> int:
        return 5_000_000
