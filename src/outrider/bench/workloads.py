"""Workloads: lists of tasks. A task is one conversation and the form of its answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from outrider.bench.prompts import chat, code, handbook, records, reports

# may draft; never drafts; has a JSON schema and may draft; has a long prompt among short ones and may draft
TaskKind = Literal["free", "plain", "constrained", "long"]
CHATS_PER_LONG = 3  # of the workload `arrivals`
ARRIVING_TOKENS = 4000  # about, of a long prompt of `arrivals`; chosen by hand
UNEVEN_TOKENS = 6000  # about, of the long rows of `uneven`
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
    """`is_fresh`: every prompt begins with a number of its own, so that no prefix cache holds it.

    Tasks of the kind "long" do so in every workload, in all variants alike.
    """

    name: str
    about: str
    tasks: tuple[Task, ...]
    is_fresh: bool = False

    def take(self, start: int, count: int, run: int = 0) -> list[Task]:
        """`count` different tasks from `start` on; the list starts over at its end.

        `run` makes the prompts of a fresh workload differ from run to run.
        """
        return [self._task(i, run) for i in range(start, start + count)]

    def _task(self, number: int, run: int) -> Task:
        lap, place = divmod(number, len(self.tasks))
        task = self.tasks[place]
        if self.is_fresh or task.kind == "long":  # four digits, so that all prompts have the same length
            return _numbered(task, (run * 97 * self.is_fresh + number) % 9000 + 1000)
        # A task that was used before begins with other words, so that no prefix cache holds it.
        return replace(task, prompt=f"Question {lap + 1}. {task.prompt}") if lap else task


def _numbered(task: Task, number: int) -> Task:
    return replace(task, prompt=f"Report no. {number}\n\n{task.prompt}")


def long_workload(prompt_tokens: int) -> Workload:
    """Questions about reports, all different; each prompt has about `prompt_tokens` tokens."""
    tasks = tuple(
        Task(f"{reports.report(i, prompt_tokens)}\n\n{text}") for i, text in enumerate(reports.QUESTIONS)
    )
    about = f"questions about a report of about {prompt_tokens} tokens"
    return Workload("long", about, tasks, is_fresh=True)


def uneven_workload(prompt_tokens: int) -> Workload:
    """In every eight requests one under a system message of about `prompt_tokens` tokens, always the same.

    The prefix cache has it after the first round. So the rounds show what the long row costs the short ones.
    """
    long = reports.report(0, prompt_tokens)
    short = [Task(text) for text in chat.PROMPTS]
    tasks = [
        Task(text, system=long) if i % 8 == 0 else short[i] for i, text in enumerate(reports.QUESTIONS[:16])
    ]
    about = f"one row of about {prompt_tokens} tokens beside seven short ones"
    return Workload("uneven", about, tuple(tasks))


def arrivals_workload(prompt_tokens: int) -> Workload:
    """After every few chats, a prompt of about `prompt_tokens` tokens arrives beside them."""
    reports_of = long_workload(prompt_tokens).tasks
    tasks: list[Task] = []
    num_chats = len(chat.PROMPTS) // CHATS_PER_LONG * CHATS_PER_LONG
    for i, text in enumerate(chat.PROMPTS[:num_chats]):
        tasks.append(Task(text))
        if i % CHATS_PER_LONG == CHATS_PER_LONG - 1:
            tasks.append(replace(reports_of[i // CHATS_PER_LONG % len(reports_of)], kind="long"))
    about = f"prompts of about {prompt_tokens} tokens that arrive beside chats"
    return Workload("arrivals", about, tuple(tasks))


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
    yield arrivals_workload(ARRIVING_TOKENS)
    yield Workload("shared", "questions under one long system message", shared)
    yield uneven_workload(UNEVEN_TOKENS)
    yield Workload("mixed", "plain, drafting and constrained rows in turn", tuple(mixed))


WORKLOADS = {workload.name: workload for workload in _workloads()}
