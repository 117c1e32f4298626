"""An engine with scripted answers, which records the requests that it was given."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from outrider.engine.engine import EngineStopped
from outrider.engine.sequence import Delta, FinishReason, Stats
from outrider.engine.validation import ValidatedRequest
from outrider.request import Request, SamplingParams

STATS = Stats(num_prompt=7, num_generated=100, steps=40, drafted=[30, 20], accepted=[25, 10])


class FakeStream:
    def __init__(self, pieces: Sequence[str], finish: FinishReason) -> None:
        self.request_id = "r"
        self.is_aborted = False
        self.finish: FinishReason = finish
        self._pieces = list(pieces)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self.is_aborted or self.finish == "done":  # type: ignore[comparison-overlap]
            raise StopAsyncIteration
        if self._pieces and self.finish != "cancelled":
            return Delta("r", (1,), self._pieces.pop(0))
        finish, self.finish = self.finish, "done"  # type: ignore[assignment]
        return Delta("r", finish_reason=finish, stats=STATS, error="it broke" if finish == "error" else None)

    def abort(self) -> None:
        self.is_aborted = True


class FakeEngine:
    """Stands for an AsyncEngine and the Engine behind it."""

    def __init__(self, pieces: Sequence[str] = (), finish: FinishReason = "stop") -> None:
        self.engine = self
        self.stream = FakeStream(pieces, finish)
        self.submitted: list[ValidatedRequest] = []
        self.validated: list[ValidatedRequest] = []
        self.validating_threads: list[str] = []
        self.aborted: list[str] = []
        self.max_submitted: int | None = None  # None: any number

    def validate(
        self, prompt_ids: Iterable[int], params: SamplingParams, **settings: Any
    ) -> ValidatedRequest:
        self.validated.append(ValidatedRequest(Request("r", tuple(prompt_ids), params, **settings)))
        self.validating_threads.append(threading.current_thread().name)
        return self.validated[-1]

    def submit(self, validated: ValidatedRequest) -> FakeStream:
        if len(self.submitted) == self.max_submitted:
            raise EngineStopped("stopped")
        self.submitted.append(validated)
        return self.stream

    def abort(self, request_id: str) -> None:
        """As the engine does: the end still comes."""
        self.aborted.append(request_id)
        self.stream.finish = "cancelled"

    @property
    def params(self) -> SamplingParams:
        return self.submitted[0].request.params

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.submitted[0].request.prompt_ids
