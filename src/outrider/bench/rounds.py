"""The measurement: every case, round by round, the variants in turns so that noise hits them alike."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from outrider.bench.answer import Answer, RoundResult
from outrider.bench.errors import BenchFailed
from outrider.bench.settings import BenchSettings
from outrider.bench.target import RequestOptions, Variant
from outrider.bench.workloads import Task, Workload
from outrider.progress import Listener, Progress, ignore

WARM_UP_TOKENS = 4  # tokens of an answer that is not timed; chosen by hand
SEEDS_PER_ROUND = 1_000_000  # distance between the first seeds of two rounds: more than requests in a round


@dataclass(frozen=True)
class Case:
    workload: Workload
    streams: int
    temperature: float

    def __str__(self) -> str:
        plural = "s" if self.streams > 1 else ""
        return f"{self.workload.name}, {self.streams} stream{plural}, temperature {self.temperature:g}"


@dataclass
class CaseResult:
    """One case and its rounds so far."""

    case: Case
    rounds: list[RoundResult] = field(default_factory=list)


class Benchmark:
    """`results` grows round by round, so that an interrupted run still has figures."""

    def __init__(
        self, variants: Sequence[Variant], settings: BenchSettings, listener: Listener = ignore
    ) -> None:
        self.variants = list(variants)
        self.settings = settings
        self.results: list[CaseResult] = []
        self._listener = listener
        self._num_done = 0  # answers
        self._warm: set[tuple[str, int, bool, str]] = set()

    def cases(self) -> list[Case]:
        return [
            Case(self.settings.workload(name), streams, temperature)
            for name in self.settings.workloads
            for temperature in self.settings.temperatures
            for streams in self.settings.streams
        ]

    @property
    def num_answers(self) -> int:
        per_round = sum(self.settings.requests_per_round(case.streams) for case in self.cases())
        return per_round * self.settings.rounds * self.settings.repeats * len(self.variants)

    async def run(self) -> None:
        await self._check_targets()
        for case in self.cases():
            result = CaseResult(case)
            self.results.append(result)
            await self._warm_up(case)
            async for one in self._rounds(case):
                result.rounds.append(one)

    async def _check_targets(self) -> None:
        """One short question to each target finds a wrong model name or key before anything is timed."""
        for target in {id(variant.target): variant.target for variant in self.variants}.values():
            options = RequestOptions(0.0, WARM_UP_TOKENS, 1, "auto" if target.can_draft else None)
            answer = await target.ask(Task("Hello!"), options)
            if answer.error is not None:
                raise BenchFailed(f"{target.name} gave no answer: {answer.error}")

    async def _rounds(self, case: Case) -> AsyncIterator[RoundResult]:
        """A variant whose requests all failed in one round gets no further round at this case."""
        given_up: set[str] = set()
        last = None
        for index in range(self.settings.rounds):
            fastest: dict[str, RoundResult] = {}
            for repeat in range(self.settings.repeats):
                for place, variant in enumerate(order_of_round(self.variants, index + repeat)):
                    self._report(case, variant, index, last)
                    if variant.name not in given_up:
                        last = await self._round(case, variant, index, place, repeat)
                        fastest[variant.name] = faster(fastest.get(variant.name), last)
                        if last.has_failed:
                            given_up.add(variant.name)
                    self._num_done += self.settings.requests_per_round(case.streams)
                    self._report(case, variant, index, last)
            for one in sorted(fastest.values(), key=lambda one: one.place):
                yield one

    def _report(self, case: Case, variant: Variant, index: int, last: RoundResult | None) -> None:
        speed = "" if last is None else f": {last.tokens_per_s:.1f} tokens/s"
        note = f"{case}, {variant.name}, round {index + 1}{speed}"
        self._listener(Progress("Measuring", self._num_done, self.num_answers, "answers", note))

    async def _round(self, case: Case, variant: Variant, index: int, place: int, repeat: int) -> RoundResult:
        count = self.settings.requests_per_round(case.streams)
        run = (index * self.settings.repeats + repeat) * len(self.variants) + self.variants.index(variant)
        tasks = case.workload.take(index * count, count, run)
        requests = [
            (task, self._options(case, variant, task, index, repeat, i)) for i, task in enumerate(tasks)
        ]
        before = await variant.target.draft_counts()
        variant.target.reset_peak()
        answers = await ask_all(variant, requests, case.streams)
        peak = variant.target.peak_bytes()
        after = await variant.target.draft_counts()
        seconds = max(answer.ended_s for answer in answers) - min(answer.started_s for answer in answers)
        drafts = None if before is None or after is None else after - before
        return RoundResult(variant.name, index, place, seconds, tuple(answers), drafts, peak)

    def _options(
        self, case: Case, variant: Variant, task: Task, index: int, repeat: int, number: int
    ) -> RequestOptions:
        """All variants use the same seeds, so that their answers can be compared."""
        seed = self.settings.seed + index * SEEDS_PER_ROUND + number
        salt = f"{case} {variant.name} {index} {repeat}"
        return RequestOptions(case.temperature, self.settings.max_tokens, seed, variant.depth_for(task), salt)

    async def _warm_up(self, case: Case) -> None:
        """A few tokens on all streams, not counted: buffers are allocated, kernels and grammars compiled."""
        tasks = warm_up_tasks(case)
        for variant in self.variants:
            key = (variant.name, case.streams, case.temperature > 0, tasks[-1].kind)
            if key in self._warm:
                continue
            self._warm.add(key)
            requests = [
                (task, RequestOptions(case.temperature, WARM_UP_TOKENS, i, variant.depth))
                for i, task in enumerate(tasks)
            ]
            await ask_all(variant, requests, case.streams)


def warm_up_tasks(case: Case) -> list[Task]:
    """Other questions than the timed ones, but all their schemas."""
    schemas = {
        json.dumps(task.schema): task.schema for task in case.workload.tasks if task.schema is not None
    }
    free = [Task(f"Count to {10 + i}.") for i in range(case.streams)]
    constrained = [Task("Count to ten.", schema=schema, kind="constrained") for schema in schemas.values()]
    return free + constrained


def order_of_round(variants: Sequence[Variant], index: int) -> list[Variant]:
    """A B, then B A: an advantage of the second place goes to each variant equally often."""
    return list(variants) if index % 2 == 0 else list(reversed(variants))


def faster(one: RoundResult | None, other: RoundResult) -> RoundResult:
    """Of two runs of a round the faster one. A run in which more answers failed is never it."""

    def cost(result: RoundResult) -> tuple[int, float]:
        return sum(answer.error is not None for answer in result.answers), result.seconds

    return other if one is None else min(one, other, key=cost)


async def ask_all(
    variant: Variant, requests: Sequence[tuple[Task, RequestOptions]], streams: int
) -> list[Answer]:
    """Answers in the order of the requests. Each stream sends its next request when its last answer ends."""
    waiting = list(enumerate(requests))[::-1]
    answers: dict[int, Answer] = {}

    async def stream() -> None:
        while waiting:
            number, (task, options) = waiting.pop()
            try:
                answers[number] = await variant.target.ask(task, options)
            except Exception as error:  # a failed answer, not the end of the benchmark
                now_s = time.perf_counter()
                answers[number] = Answer(task.kind, now_s, now_s, error=f"{type(error).__name__}: {error}")

    async with asyncio.TaskGroup() as group:
        for _ in range(min(streams, len(requests))):
            group.create_task(stream())
    return [answers[number] for number in range(len(requests))]
