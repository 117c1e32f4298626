"""Loads: how many requests decode at a time, and when each of them is sent."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from outrider.bench.answer import Answer
from outrider.bench.workloads import Task

MIN_REQUESTS = 4  # of a load, so that few streams have several answers, too
JOIN_AFTER_CHUNKS = 8  # chunks of the request before, after which the next one joins: it decodes by then

# Sends a request. The function that is passed along is called at each chunk that has text.
Ask = Callable[[Task, Callable[[], None]], Awaitable[Answer]]


@dataclass(frozen=True)
class Load:
    """`joins`: each stream begins while the others decode, and sends its next request when one has ended.

    Otherwise all streams send their requests at the same time, wait for all answers, and start again.
    """

    num_streams: int
    joins: bool = False

    @property
    def num_requests(self) -> int:
        return max(MIN_REQUESTS, self.num_streams * (2 if self.joins else 1))

    @property
    def text(self) -> str:
        if self.num_streams == 1:
            return "1 stream"
        return f"{self.num_streams} streams, {'joining' if self.joins else 'at once'}"


def loads_of(streams: Sequence[int]) -> list[Load]:
    """One stream has no neighbours to join."""
    return [Load(n) for n in streams] + [Load(n, joins=True) for n in streams if n > 1]


async def send(load: Load, ask: Ask, tasks: Sequence[Task]) -> list[Answer]:
    """The answers in the order of the tasks."""
    if load.joins:
        return await _send_joining(load.num_streams, ask, tasks)
    answers: list[Answer] = []
    for start in range(0, len(tasks), load.num_streams):
        wave = tasks[start : start + load.num_streams]
        answers += await asyncio.gather(*(ask(task, lambda: None) for task in wave))
    return answers


async def _send_joining(num_streams: int, ask: Ask, tasks: Sequence[Task]) -> list[Answer]:
    answers: dict[int, Answer] = {}
    waiting = deque(enumerate(tasks))
    may_begin = [asyncio.Event() for _ in range(num_streams + 1)]
    may_begin[0].set()

    async def stream(place: int) -> None:
        await may_begin[place].wait()
        chunks = _countdown(may_begin[place + 1].set)
        while waiting:
            number, task = waiting.popleft()
            answers[number] = await ask(task, lambda: next(chunks))
            may_begin[place + 1].set()  # also after an error or a short answer
        may_begin[place + 1].set()  # the other streams may have sent all requests before this one began

    await asyncio.gather(*(stream(place) for place in range(num_streams)))
    return [answers[number] for number in range(len(tasks))]


def _countdown(then: Callable[[], None]) -> Iterator[None]:
    """Calls `then` once, at the chunk after which the next request joins."""
    for _ in range(JOIN_AFTER_CHUNKS - 1):
        yield
    then()
    while True:
        yield
