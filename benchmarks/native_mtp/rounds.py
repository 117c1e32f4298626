"""The measurement: plain answers alone first, then rounds in which all servers take turns at every load."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.native_mtp.loads import Load, send
from benchmarks.native_mtp.measured import MeasuredServer
from benchmarks.native_mtp.results import Cell, unequal
from benchmarks.server_process import DidNotStart
from outrider.bench.answer import Answer
from outrider.bench.workloads import Task

WARM_UP_TOKENS = 8


@dataclass
class Subject:
    """A server of one make, started with MTP and without it."""

    name: str  # with its version
    package: str = ""
    forms: list[MeasuredServer] = field(default_factory=list)  # without those that were given up
    problems: list[str] = field(default_factory=list)  # why a form was given up
    alone: dict[str, str] = field(default_factory=dict)  # prompt -> plain answer alone
    alone_s: float = 0.0  # seconds for all of them

    @property
    def plain(self) -> MeasuredServer | None:
        return next((form for form in self.forms if not form.has_mtp), None)


class Rounds:
    def __init__(
        self,
        subjects: Sequence[Subject],
        loads: Sequence[Load],
        tasks: Sequence[Task],
        max_tokens: int,
        count_tokens: Callable[[str], int],
        say: Callable[[str], None],
    ) -> None:
        self.cells: list[Cell] = []
        self._subjects, self._loads, self._tasks = subjects, loads, tasks
        self._max_tokens, self._count_tokens, self._say = max_tokens, count_tokens, say

    async def answer_alone(self) -> None:
        """Warms all servers up, then asks each plain server every question, one at a time."""
        widest = max(load.num_streams for load in self._loads)
        for subject in self._subjects:
            for form in list(subject.forms):
                answers = await self._send(form, Load(widest), self._take(0, widest), WARM_UP_TOKENS)
                if all(answer.error is not None for answer in answers):
                    subject.problems.append(f"{form.name} answers nothing: {answers[0].error}")
                    subject.forms.remove(form)
            if subject.plain is not None:
                await self._answer_alone(subject, subject.plain)

    async def _answer_alone(self, subject: Subject, plain: MeasuredServer) -> None:
        began_s = time.perf_counter()
        answers = await self._send(plain, Load(1), self._tasks, self._max_tokens)
        subject.alone_s = time.perf_counter() - began_s
        pairs = zip(self._tasks, answers, strict=True)
        subject.alone = {task.prompt: answer.text for task, answer in pairs if answer.error is None}
        num_failed = len(answers) - len(subject.alone)
        counted = f"{len(answers)} plain answers alone in {subject.alone_s:.1f} s, {num_failed} failed"
        self._say(f"{subject.name}: {counted}")

    def expected_s(self) -> float:
        """Seconds of a round in which each answer takes as long as a plain answer alone."""
        share = sum(load.num_requests for load in self._loads) / len(self._tasks)
        return sum(len(subject.forms) * share * subject.alone_s for subject in self._subjects)

    async def run(self, index: int) -> None:
        """One round. The order of the servers, and of their forms, changes with the round."""
        start = index * max(load.num_requests for load in self._loads)
        first = index % len(self._subjects)
        order = [*self._subjects[first:], *self._subjects[:first]]
        for load in self._loads:
            for subject in order:
                for form in list(reversed(subject.forms) if index % 2 else subject.forms):
                    await self._measure(subject, form, load, start, index)

    async def _measure(
        self, subject: Subject, form: MeasuredServer, load: Load, start: int, index: int
    ) -> None:
        tasks = self._take(start, load.num_requests)
        began_s = time.perf_counter()
        answers = await self._send(form, load, tasks, self._max_tokens)
        errors = tuple(answer.error for answer in answers if answer.error is not None)
        cell = Cell(
            subject.name,
            form.has_mtp,
            load,
            index,
            max(answer.ended_s for answer in answers) - began_s,
            sum(self._count_tokens(answer.text) for answer in answers if answer.error is None),
            len(answers),
            unequal(tasks, answers, subject.alone),
            errors,
            has_crashed=form.has_crashed(after_errors=bool(errors)),
        )
        self.cells.append(cell)
        self._say(f"round {index + 1}, {load.text}, {form.name}: {cell.text}")
        if cell.has_crashed or len(cell.errors) == len(answers):
            self._restart(subject, form)

    def _restart(self, subject: Subject, form: MeasuredServer) -> None:
        self._say(f"{form.name} is started again: {form.last_words()}")
        try:
            form.restart()
        except DidNotStart as error:
            subject.problems.append(str(error))
            subject.forms.remove(form)
            form.stop()

    async def _send(
        self, form: MeasuredServer, load: Load, tasks: Sequence[Task], max_tokens: int
    ) -> list[Answer]:
        return await send(load, lambda task, on_text: form.ask(task, on_text, max_tokens), tasks)

    def _take(self, start: int, count: int) -> list[Task]:
        return [self._tasks[i % len(self._tasks)] for i in range(start, start + count)]


def equal_to_first(subjects: Sequence[Subject]) -> dict[str, tuple[int, int]]:
    """For each other subject: plain answers alone that are those of the first one, and the number of all."""
    first = subjects[0].alone
    return {
        subject.name: (sum(first.get(prompt) == text for prompt, text in subject.alone.items()), len(first))
        for subject in subjects[1:]
        if subject.alone
    }
