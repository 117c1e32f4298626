"""Workloads: lists of tasks. A task is one conversation and the form of its answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from outrider.bench.prompts import chat, code, handbook, records, reports

TaskKind = Literal["free", "plain", "constrained"]  # may draft; never drafts; has a JSON schema and may draft
JSON_REQUEST = "Put the facts of this text into JSON: "


@dataclass(frozen=True)
class Task:
    """One request, the same for every target."""

    prompt: str
    system: str | None = None
    schema: dict[str, Any] | None = field(default=None, hash=False)
    kind: TaskKind = "free"

    @property
    def messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        return [*system, {"role": "user", "content": self.prompt}]


@dataclass(frozen=True)
class Workload:
    """`is_fresh`: every prompt begins with a number of its own, so that no prefix cache holds it."""

    name: str
    about: str
    tasks: tuple[Task, ...]
    is_fresh: bool = False

    def take(self, start: int, count: int, run: int = 0) -> list[Task]:
        """`count` different tasks from `start` on; the list starts over at its end.

        `run` makes the prompts of a fresh workload differ from run to run.
        """
        taken = [(i, self.tasks[i % len(self.tasks)]) for i in range(start, start + count)]
        if self.is_fresh:  # numbers of four digits, so that all prompts have the same length
            return [_numbered(task, (run * 97 + i) % 9000 + 1000) for i, task in taken]
        return [_repeated(task, i // len(self.tasks)) for i, task in taken]


def _repeated(task: Task, lap: int) -> Task:
    """A task that was used `lap` times begins with other words, so that no prefix cache holds it."""
    return replace(task, prompt=f"Question {lap + 1}. {task.prompt}") if lap else task


def _numbered(task: Task, number: int) -> Task:
    return replace(task, prompt=f"Report no. {number}\n\n{task.prompt}")


def _chat() -> Workload:
    return Workload("chat", "everyday questions", tuple(Task(text) for text in chat.PROMPTS))


def _code() -> Workload:
    return Workload("code", "programs to write and repair", tuple(Task(text) for text in code.PROMPTS))


def _json_tasks() -> tuple[Task, ...]:
    return tuple(
        Task(JSON_REQUEST + text, schema=schema, kind="constrained") for text, schema in records.PROMPTS
    )


def _json() -> Workload:
    return Workload("json", "facts into JSON, with a schema", _json_tasks())


def _long() -> Workload:
    tasks = [Task(f"{reports.report(i)}\n\n{question}") for i, question in enumerate(reports.QUESTIONS)]
    return Workload("long", "questions about a report of about 700 tokens", tuple(tasks), is_fresh=True)


def _shared() -> Workload:
    tasks = tuple(Task(question, system=handbook.HANDBOOK) for question in handbook.QUESTIONS)
    return Workload("shared", "questions under one long system message", tasks)


def _mixed() -> Workload:
    """One third never drafts, one third drafts, one third has a JSON schema and drafts."""
    plain = (Task(text, kind="plain") for text in chat.PROMPTS)
    free = (Task(text) for text in code.PROMPTS)
    rows = zip(plain, free, _json_tasks(), strict=True)
    return Workload("mixed", "plain, drafting and constrained rows in turn", tuple(itertools.chain(*rows)))


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "chat": _chat,
    "code": _code,
    "json": _json,
    "long": _long,
    "shared": _shared,
    "mixed": _mixed,
}


def workloads(names: Sequence[str]) -> list[Workload]:
    return [WORKLOADS[name]() for name in names]
