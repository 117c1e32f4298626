"""Workloads: lists of tasks. A task is one conversation and the form of its answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
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
        # A task that was used before begins with other words, so that no prefix cache holds it.
        laps = [(i // len(self.tasks), task) for i, task in taken]
        return [
            replace(task, prompt=f"Question {lap + 1}. {task.prompt}") if lap else task for lap, task in laps
        ]


def _numbered(task: Task, number: int) -> Task:
    return replace(task, prompt=f"Report no. {number}\n\n{task.prompt}")


def long_workload(prompt_tokens: int) -> Workload:
    """Questions about reports, all different; each prompt has about `prompt_tokens` tokens."""
    tasks = tuple(
        Task(f"{reports.report(i, prompt_tokens)}\n\n{text}") for i, text in enumerate(reports.QUESTIONS)
    )
    about = f"questions about a report of about {prompt_tokens} tokens"
    return Workload("long", about, tasks, is_fresh=True)


def _workloads() -> Iterator[Workload]:
    everyday = tuple(Task(text) for text in chat.PROMPTS)
    programs = tuple(Task(text) for text in code.PROMPTS)
    constrained = tuple(
        Task(JSON_REQUEST + text, schema=schema, kind="constrained") for text, schema in records.PROMPTS
    )
    shared = tuple(Task(text, system=handbook.HANDBOOK) for text in handbook.QUESTIONS)
    plain = [replace(task, kind="plain") for task in everyday]
    mixed = itertools.chain(*zip(plain, programs, constrained, strict=True))
    yield Workload("chat", "everyday questions", everyday)
    yield Workload("code", "programs to write and repair", programs)
    yield Workload("json", "facts into JSON, with a schema", constrained)
    yield long_workload(reports.REPORT_TOKENS)
    yield Workload("shared", "questions under one long system message", shared)
    yield Workload("mixed", "plain, drafting and constrained rows in turn", tuple(mixed))


WORKLOADS = {workload.name: workload for workload in _workloads()}
