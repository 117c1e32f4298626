"""The measuring itself: every case, round by round, the arms in turns so that noise hits them alike."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from outrider.bench.answer import Answer, Round
from outrider.bench.errors import BenchFailed
from outrider.bench.settings import Settings
from outrider.bench.target import Arm, Asking
from outrider.bench.workloads import Task, Workload, workloads

WARM_UP_TOKENS = 4
SEEDS_A_ROUND = 1_000_000


@dataclass(frozen=True)
class Case:
    workload: Workload
    streams: int
    temperature: float

    def __str__(self) -> str:
        plural = "s" if self.streams > 1 else ""
        return f"{self.workload.name}, {self.streams} stream{plural}, temperature {self.temperature:g}"


@dataclass
class Measured:
    """One case and its rounds so far."""

    case: Case
    rounds: list[Round] = field(default_factory=list)


@dataclass(frozen=True)
class Turn:
    """What is under way, for those who watch."""

    case: Case
    arm: Arm
    index: int
    num_done: int  # answers, over the whole benchmark
    num_total: int
    last: Round | None


Watcher = Callable[[Turn], None]


class Benchmark:
    """`measured` fills as it runs, so that an interrupted run still has something to tell."""

    def __init__(self, arms: Sequence[Arm], settings: Settings, watch: Watcher = lambda turn: None) -> None:
        self.arms = list(arms)
        self.settings = settings
        self.measured: list[Measured] = []
        self._watch = watch
        self._num_done = 0
        self._warm: set[tuple[str, int, bool, str]] = set()

    def cases(self) -> list[Case]:
        return [
            Case(workload, streams, temperature)
            for workload in workloads(self.settings.workloads)
            for temperature in self.settings.temperatures
            for streams in self.settings.streams
        ]

    @property
    def num_answers(self) -> int:
        a_round = sum(self.settings.requests_a_round(case.streams) for case in self.cases())
        return a_round * self.settings.rounds * len(self.arms)

    async def run(self) -> None:
        await self._probe()
        for case in self.cases():
            measured = Measured(case)
            self.measured.append(measured)
            await self._warm_up(case)
            async for one in self._rounds(case):
                measured.rounds.append(one)

    async def _probe(self) -> None:
        """One short question to each target: a wrong model name or key is said before anything is timed."""
        for target in {id(arm.target): arm.target for arm in self.arms}.values():
            asking = Asking(0.0, WARM_UP_TOKENS, 1, "auto" if target.can_draft else None)
            answer = await target.ask(Task("Hello!"), asking)
            if answer.error is not None:
                raise BenchFailed(f"{target.name} gave no answer: {answer.error}")

    async def _rounds(self, case: Case) -> AsyncIterator[Round]:
        """An arm that brought not one answer in a round does not get another turn at this case."""
        given_up: set[str] = set()
        last = None
        for index in range(self.settings.rounds):
            for place, arm in enumerate(turns(self.arms, index)):
                self._watch(Turn(case, arm, index, self._num_done, self.num_answers, last))
                if arm.name not in given_up:
                    last = await self._round(case, arm, index, place)
                    yield last
                    if last.has_failed:
                        given_up.add(arm.name)
                self._num_done += self.settings.requests_a_round(case.streams)
                self._watch(Turn(case, arm, index, self._num_done, self.num_answers, last))

    async def _round(self, case: Case, arm: Arm, index: int, place: int) -> Round:
        count = self.settings.requests_a_round(case.streams)
        run = index * len(self.arms) + self.arms.index(arm)
        tasks = case.workload.take(index * count, count, run)
        asked = [(task, self._asking(case, arm, task, index, i)) for i, task in enumerate(tasks)]
        before = await arm.target.draft_counts()
        arm.target.reset_peak()
        answers = await ask_all(arm, asked, case.streams)
        peak = arm.target.peak_bytes()
        after = await arm.target.draft_counts()
        seconds = max(answer.ended_s for answer in answers) - min(answer.started_s for answer in answers)
        drafts = None if before is None or after is None else after - before
        return Round(arm.name, index, place, seconds, tuple(answers), drafts, peak)

    def _asking(self, case: Case, arm: Arm, task: Task, index: int, number: int) -> Asking:
        """Seeds repeat from arm to arm: with and without drafts the answers are the same."""
        seed = self.settings.seed + index * SEEDS_A_ROUND + number
        turn = f"{case} {arm.name} {index}"
        return Asking(case.temperature, self.settings.max_tokens, seed, arm.depth_for(task), turn)

    async def _warm_up(self, case: Case) -> None:
        """As many streams as will run, a few tokens each, uncounted: buffers, kernels, grammars are made."""
        tasks = warm_up_tasks(case)
        for arm in self.arms:
            key = (arm.name, case.streams, case.temperature > 0, tasks[-1].kind)
            if key in self._warm:
                continue
            self._warm.add(key)
            asked = [
                (task, Asking(case.temperature, WARM_UP_TOKENS, i, arm.depth)) for i, task in enumerate(tasks)
            ]
            await ask_all(arm, asked, case.streams)


def warm_up_tasks(case: Case) -> list[Task]:
    """Other questions than those that are timed, but every schema that will come."""
    schemas = {
        json.dumps(task.schema): task.schema for task in case.workload.tasks if task.schema is not None
    }
    free = [Task(f"Count to {10 + i}.") for i in range(case.streams)]
    held = [Task("Count to ten.", schema=schema, kind="constrained") for schema in schemas.values()]
    return free + held


def turns(arms: Sequence[Arm], index: int) -> list[Arm]:
    """A B, then B A: whoever gains from coming second gains every other time."""
    return list(arms) if index % 2 == 0 else list(reversed(arms))


async def ask_all(arm: Arm, asked: Sequence[tuple[Task, Asking]], streams: int) -> list[Answer]:
    """Each stream asks its next question as soon as its last answer has ended; answers in tasks' order."""
    waiting = list(enumerate(asked))[::-1]
    answers: dict[int, Answer] = {}

    async def stream() -> None:
        while waiting:
            number, (task, asking) = waiting.pop()
            try:
                answers[number] = await arm.target.ask(task, asking)
            except Exception as error:  # one answer less, not the end of the benchmark
                now_s = time.perf_counter()
                answers[number] = Answer(task.kind, now_s, now_s, error=f"{type(error).__name__}: {error}")

    async with asyncio.TaskGroup() as group:
        for _ in range(min(streams, len(asked))):
            group.create_task(stream())
    return [answers[number] for number in range(len(asked))]
