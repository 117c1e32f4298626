"""The answers to one API request: its engine streams, merged, measured, and freed whatever happens.

Knows events only as far as it must (first, last, how long between). Their JSON is the routes'.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from outrider.api.admission import Admission, Ticket
from outrider.api.backend import EventStream
from outrider.api.errors import ApiError
from outrider.api.operations.metrics import Metrics
from outrider.api.request_id import current_request_id
from outrider.chat.events import ChatEvent, Finished, Logprobs, TextDelta, Usage

log = logging.getLogger(__name__)

MAX_UNREAD = 16  # events between the streams and the writer; past that the engine's outbox merges

Start = Callable[[], Awaitable[EventStream]]


@dataclass
class ChoiceState:
    """What is known of one stream, for /v1/status and the metrics."""

    request_id: str
    num_prompt: int
    num_events: int = 0
    first_s: float | None = None
    last_s: float | None = None
    finished: Finished | None = None


class Answers:
    """Iterate `events` once; `close` when done, or to give up."""

    def __init__(self, api: str, streams: Sequence[EventStream], ticket: Ticket, desk: AnswerDesk) -> None:
        self.api = api
        self.http_id = current_request_id.get()
        self.started_s = time.perf_counter()
        self.choices = [ChoiceState(stream.request_id, len(stream.prompt_ids)) for stream in streams]
        self._streams = streams
        self._ticket = ticket
        self._desk = desk
        self._unread: asyncio.Queue[tuple[int, ChatEvent]] = asyncio.Queue(MAX_UNREAD)
        self._pumps = [asyncio.create_task(self._pump(i, stream)) for i, stream in enumerate(streams)]
        desk.live[id(self)] = self

    def events(self, with_logprobs: bool = False) -> AsyncIterator[tuple[int, ChatEvent]]:
        """(choice, event) as they come; each choice ends with its Finished."""
        return _logprobs_first(self._merged()) if with_logprobs else self._merged()

    async def _merged(self) -> AsyncIterator[tuple[int, ChatEvent]]:
        num_left = len(self._streams)
        while num_left:
            choice, event = await self._unread.get()
            self._watch(self.choices[choice], event)
            if isinstance(event, Finished):
                num_left -= 1
            yield choice, event

    def close(self) -> None:
        """Free the rows that still run and the places taken."""
        for pump in self._pumps:
            pump.cancel()
        for stream, state in zip(self._streams, self.choices, strict=True):
            if state.finished is None:
                stream.abort()
        if self._desk.live.pop(id(self), None) is not None:
            self._ticket.leave()
            for state in self.choices:
                self._desk.metrics.answered(self.api, state.finished)

    async def _pump(self, choice: int, stream: EventStream) -> None:
        last: ChatEvent = Finished("cancelled", Usage(), error="the stream ended without an end")
        try:
            async for event in stream:
                await self._unread.put((choice, event))
                if isinstance(event, Finished):
                    return
        except Exception as error:  # the service failed, not the model: the client must still see an end
            log.exception("stream %s failed", stream.request_id)
            last = Finished("error", Usage(), error=f"{type(error).__name__}: {error}")
        await self._unread.put((choice, last))

    def _watch(self, state: ChoiceState, event: ChatEvent) -> None:
        now_s = time.perf_counter()
        if isinstance(event, Finished):
            state.finished = event
            return
        if isinstance(event, Logprobs):
            return
        state.num_events += 1
        if state.last_s is None:
            state.first_s = now_s
            self._desk.metrics.first_token_s.labels(self.api).observe(now_s - self.started_s)
        else:
            self._desk.metrics.inter_token_s.labels(self.api).observe(now_s - state.last_s)
        state.last_s = now_s


async def _logprobs_first(
    events: AsyncIterator[tuple[int, ChatEvent]],
) -> AsyncIterator[tuple[int, ChatEvent]]:
    """The same events, with log-probabilities before the text that they follow: one chunk can carry both."""
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


class AnswerDesk:
    """Lets requests in, starts their streams, and keeps the list of those alive."""

    def __init__(self, admission: Admission, metrics: Metrics) -> None:
        self.admission = admission
        self.metrics = metrics
        self.live: dict[int, Answers] = {}

    async def start(self, api: str, starts: Sequence[Start]) -> Answers:
        """All streams, or none and the first one's exception."""
        ticket = self.admission.enter(len(starts))
        streams: list[EventStream] = []
        try:
            for start in starts:
                streams.append(await start())
            return Answers(api, streams, ticket, self)
        except BaseException:
            for stream in streams:
                stream.abort()
            ticket.leave()
            raise


def raise_if_failed(finished: Finished) -> None:
    """For answers that are sent whole: an end that is no answer is an HTTP error."""
    if finished.reason == "error":
        raise ApiError(500, failure_message(finished))
    if finished.reason == "cancelled":
        raise ApiError(503, failure_message(finished), headers={"Retry-After": "5"})


def failure_message(finished: Finished) -> str:
    if finished.reason == "cancelled":
        return "the answer was cancelled: the server is shutting down"
    return finished.error or "the engine failed"


def is_failure(finished: Finished) -> bool:
    return finished.reason in ("error", "cancelled")
