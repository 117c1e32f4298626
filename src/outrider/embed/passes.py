"""Which inputs share a pass. Pure Python.

Jobs take turns, one input at a time: a small job does not wait for a large one. A job's inputs come in the
order of their lengths, so that inputs of equal length meet in a pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from outrider.pooling import TokenInput, Vector


class EmbeddingJob:
    """The inputs of one request and their vectors. Made by `EmbeddingEngine.submit`."""

    def __init__(self, inputs: Sequence[TokenInput]) -> None:
        self.inputs = inputs
        self.result: Future[list[Vector]] = Future()
        self.result.set_running_or_notify_cancel()  # from now on nobody can cancel it: see `abandon`
        self.has_started = False
        self.is_abandoned = False
        self.waiting = deque(sorted(range(len(inputs)), key=lambda i: len(inputs[i])))
        self._vectors: dict[int, Vector] = {}
        if not inputs:
            self.result.set_result([])

    def abandon(self) -> None:
        """Nobody waits for the vectors any more: passes that have not begun leave them out."""
        self.is_abandoned = True

    def deliver(self, index: int, vector: Vector) -> None:
        self._vectors[index] = vector
        if len(self._vectors) == len(self.inputs) and not self.result.done():
            self.result.set_result([self._vectors[i] for i in range(len(self.inputs))])

    def fail(self, error: BaseException) -> None:
        self.abandon()
        if not self.result.done():
            self.result.set_exception(error)


PassInput = tuple[EmbeddingJob, int]  # a job, and which of its inputs


@dataclass
class PassQueue:
    """The jobs that have inputs to compute. One thread uses it at a time."""

    pass_tokens: int
    _jobs: deque[EmbeddingJob] = field(default_factory=deque)

    def add(self, job: EmbeddingJob) -> None:
        self._jobs.append(job)

    def next_pass(self) -> list[PassInput]:
        """At most `pass_tokens` tokens, or one longer input; empty if there is nothing to do."""
        chosen: list[PassInput] = []
        num_tokens = 0
        while self._jobs:
            job = self._jobs.popleft()
            if job.is_abandoned or not job.waiting:
                continue
            length = len(job.inputs[job.waiting[0]])
            if chosen and num_tokens + length > self.pass_tokens:
                self._jobs.appendleft(job)
                break
            job.has_started = True
            chosen.append((job, job.waiting.popleft()))
            num_tokens += length
            self._jobs.append(job)
        return chosen

    def drain(self) -> list[EmbeddingJob]:
        """Take out all jobs."""
        jobs, self._jobs = list(self._jobs), deque()
        return jobs
