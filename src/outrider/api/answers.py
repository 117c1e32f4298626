"""The API requests that run or wait: their limit, and the answers of each as one stream of events.

Must not know JSON: the routes render the events.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.api.errors import ApiError
from outrider.api.middleware import current_request_id
from outrider.api.operations.metrics import Metrics
from outrider.chat.events import ChatEvent, Finished, Logprobs, TextDelta, Usage

log = logging.getLogger(__name__)

# Events that wait for the HTTP writer, per API request. When the queue is full, the engine's outbox
# merges further tokens into larger deltas. Chosen by hand.
MAX_QUEUED_EVENTS = 16


class EventStream(Protocol):
    """One answer of the chat service. Its last event is a Finished."""

    @property
    def request_id(self) -> str: ...

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...

    def __aiter__(self) -> AsyncIterator[ChatEvent]: ...

    def abort(self) -> None: ...


StartStream = Callable[[], Awaitable[EventStream]]


@dataclass
class ChoiceState:
    """Progress of one choice, for /v1/status and the metrics."""

    engine_id: str  # the engine's id of this choice
    num_prompt: int
    num_events: int = 0
    first_s: float | None = None  # time of its first event
    last_s: float | None = None  # time of its latest event
    finished: Finished | None = None


class LiveRequests:
    """The API requests that run or wait. Used from the event loop only.

    The limit counts engine requests: a request for n choices counts n times. Below the limit, the engine
    decides which requests run and which wait.
    """

    def __init__(self, max_rows: int, max_queue: int, retry_after_s: int, metrics: Metrics) -> None:
        self.capacity = max_rows + max_queue
        self.num_live = 0
        self.is_draining = False
        self.answers: dict[int, Answers] = {}  # by id()
        self.metrics = metrics
        self._headers = {"Retry-After": str(retry_after_s)}

    async def start(self, api: str, starts: Sequence[StartStream]) -> Answers:
        """Start one stream per choice. If one cannot start, abort the others and raise its exception.

        Raises ApiError: 503 during a shutdown, 400 if the choices exceed the capacity, 429 if they exceed
        the part of it that is free now.
        """
        self._reserve(len(starts))
        streams: list[EventStream] = []
        try:
            for start in starts:
                streams.append(await start())
            return Answers(api, streams, self)
        except BaseException:
            for stream in streams:
                stream.abort()
            self.num_live -= len(starts)
            raise

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.is_draining = True

    def _reserve(self, num_choices: int) -> None:
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", headers=self._headers)
        if num_choices > self.capacity:
            raise ApiError(
                400,
                f"this request asks for {num_choices} answers; this server runs and queues at most "
                f"{self.capacity} (--max-rows + --max-queue): ask for fewer",
            )
        if self.num_live + num_choices > self.capacity:
            raise ApiError(
                429,
                f"the server is busy: {self.num_live} requests run or wait, of at most {self.capacity}. "
                "Try again later.",
                code="rate_limit_exceeded",
                headers=self._headers,
            )
        self.num_live += num_choices


class Answers:
    """All choices of one API request. Iterate `events` once, and `close` at the end or to give up."""

    def __init__(self, api: str, streams: Sequence[EventStream], live: LiveRequests) -> None:
        self.api = api
        self.request_id = current_request_id.get()
        self.started_s = time.perf_counter()
        self.choices = [ChoiceState(stream.request_id, len(stream.prompt_ids)) for stream in streams]
        self._streams = streams
        self._live = live
        self._queue: asyncio.Queue[tuple[int, ChatEvent]] = asyncio.Queue(MAX_QUEUED_EVENTS)
        self._pumps = [asyncio.create_task(self._pump(i, stream)) for i, stream in enumerate(streams)]
        live.answers[id(self)] = self

    def events(self, with_logprobs: bool = False) -> AsyncIterator[tuple[int, ChatEvent]]:
        """(choice, event) in order of arrival. The last event of each choice is its Finished."""
        return _logprobs_before_text(self._merged()) if with_logprobs else self._merged()

    async def feed_all(self, feed: Callable[[int, ChatEvent], object], with_logprobs: bool = False) -> None:
        """Pass every event to `feed`, then close. Raise an ApiError if a choice fails."""
        try:
            async for choice, event in self.events(with_logprobs):
                if isinstance(event, Finished) and (error := failure_of(event)):
                    raise error
                feed(choice, event)
        finally:
            self.close()

    def close(self) -> None:
        """Abort the choices that still run and free their places. A second call has no effect."""
        for pump in self._pumps:
            pump.cancel()
        for stream, state in zip(self._streams, self.choices, strict=True):
            if state.finished is None:
                stream.abort()
        if self._live.answers.pop(id(self), None) is not None:
            self._live.num_live -= len(self.choices)
            for state in self.choices:
                self._live.metrics.count_answer(self.api, state.finished)

    async def _merged(self) -> AsyncIterator[tuple[int, ChatEvent]]:
        num_running = len(self._streams)
        while num_running:
            choice, event = await self._queue.get()
            self._measure(self.choices[choice], event)
            if isinstance(event, Finished):
                num_running -= 1
            yield choice, event

    async def _pump(self, choice: int, stream: EventStream) -> None:
        last: ChatEvent = Finished("cancelled", Usage(), error="the stream ended without a Finished event")
        try:
            async for event in stream:
                await self._queue.put((choice, event))
                if isinstance(event, Finished):
                    return
        except Exception as error:  # a fault in the chat service: the client still gets a last event
            log.exception("stream %s failed", stream.request_id)
            last = Finished("error", Usage(), error=f"{type(error).__name__}: {error}")
        await self._queue.put((choice, last))

    def _measure(self, state: ChoiceState, event: ChatEvent) -> None:
        now_s = time.perf_counter()
        if isinstance(event, Finished):
            state.finished = event
            return
        if isinstance(event, Logprobs):
            return
        state.num_events += 1
        metrics = self._live.metrics
        if state.last_s is None:
            state.first_s = now_s
            metrics.first_token_s.labels(self.api).observe(now_s - self.started_s)
        else:
            metrics.inter_token_s.labels(self.api).observe(now_s - state.last_s)
        state.last_s = now_s


async def _logprobs_before_text(
    events: AsyncIterator[tuple[int, ChatEvent]],
) -> AsyncIterator[tuple[int, ChatEvent]]:
    """Swap each text delta with the log-probabilities that follow it, so that one chunk can carry both."""
    held: dict[int, TextDelta] = {}
    async for choice, event in events:
        text = held.pop(choice, None)
        if isinstance(event, Logprobs):
            yield choice, event
        if text is not None:
            yield choice, text
        if isinstance(event, TextDelta):
            held[choice] = event
        elif not isinstance(event, Logprobs):
            yield choice, event


def failure_of(finished: Finished) -> ApiError | None:
    """The HTTP error of an answer that failed; None for an answer that ended normally."""
    if finished.reason == "cancelled":
        message = "the answer was cancelled: the server is shutting down"
        return ApiError(503, message, headers={"Retry-After": "5"})
    if finished.reason == "error":
        return ApiError(500, finished.error or "the engine failed; the server's log has the details")
    return None
