"""The API requests that run or wait, and the answers of each as one stream of events.

Must not know JSON: the routes render the events.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.types import Receive

from outrider.api.admission import Admission, Reservation, current_reservation
from outrider.api.chat_backend import EventStream, PreparedAnswers
from outrider.api.errors import ApiError, internal_error
from outrider.api.middleware import current_request_id, note_answers, note_refusal
from outrider.api.operations.metrics import Metrics
from outrider.api.request_summary import summary_of
from outrider.api.served_model import RequestedModel, ServedModel
from outrider.api.settings import ServerSettings
from outrider.api.sse import until_disconnected
from outrider.chat.events import (
    ChatEvent,
    Finished,
    Logprobs,
    PromptLogprobs,
    PromptProgress,
    TextDelta,
    TokenOrigins,
    Usage,
)
from outrider.pool.model_pool import Lease

if TYPE_CHECKING:
    from outrider.api.tracing import Tracing

log = logging.getLogger(__name__)

# Events that wait for the HTTP writer, per API request. When the queue is full, the engine's outbox
# merges further tokens into larger deltas. Chosen by hand.
MAX_QUEUED_EVENTS = 16
DRAIN_LOOK_S = 0.05  # seconds between two looks at whether the running requests have ended; chosen by hand


Prepare = Callable[[], Awaitable[PreparedAnswers]]
PromptsFor = Callable[[ServedModel], Iterable[Prepare]]


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

    Admission decides how many there may be; below its limits, the engine decides which requests run.
    """

    def __init__(
        self,
        admission: Admission,
        metrics: Metrics,
        settings: ServerSettings,
        tracing: Tracing | None = None,
    ) -> None:
        self.admission = admission
        self._settings = settings
        self.answers: dict[int, Answers] = {}  # by id()
        self.metrics = metrics
        self.tracing = tracing

    @property
    def num_live(self) -> int:
        """Engine requests that run or wait, and other POST requests whose body is complete."""
        return self.admission.held.num_requests

    @property
    def is_draining(self) -> bool:
        return self.admission.is_draining

    async def start(
        self,
        api: str,
        model: RequestedModel,
        num_answers: int,
        prompts_for: PromptsFor,
        receive: Receive,
        timeout_s: float | None = None,
    ) -> Answers:
        """Load the model if needed, prepare all prompts, then start all answers. If one cannot, none runs.

        `prompts_for` is called only after the answers are admitted. Raises ApiError if they are not: see
        Admission; also if the model cannot be loaded, a time limit ends, or the client disconnects
        (`receive`), before they have started. `timeout_s`: the client's limit.
        """
        limits, arrived_s = self.time_limits(timeout_s), time.perf_counter()
        reservation = current_reservation.get()
        reservation.usage.check_tokens()
        reservation.add(num_requests=num_answers - 1)  # the request itself holds a place already
        leases: list[Lease[ServedModel]] = []
        streams: list[EventStream] = []
        try:
            preparing = _prepare_all(model, leases, prompts_for, reservation)
            async with limits.preparing():
                prepared = await until_disconnected(receive, preparing)
            for one in prepared:
                streams += one.start()
            return Answers(api, model.name, arrived_s, streams, self, reservation, limits, leases[0])
        except BaseException:
            for stream in streams:
                stream.abort()
            for lease in leases:
                lease.release()
            raise

    def time_limits(self, timeout_s: float | None) -> TimeLimits:
        """The deadlines of a request that begins now. `timeout_s`: the client's own limit."""
        return TimeLimits(self._settings, timeout_s)

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.admission.is_draining = True

    async def until_none_is_live(self) -> None:
        while self.num_live:
            await asyncio.sleep(DRAIN_LOOK_S)


async def _prepare_all(
    model: RequestedModel,
    leases: list[Lease[ServedModel]],
    prompts_for: PromptsFor,
    reservation: Reservation,
) -> list[PreparedAnswers]:
    """The lease goes into a list, so that it is released also if this task is cancelled at its very end."""
    leases.append(await model.lease())
    reservation.allow_prompt_of(leases[0].model.facts.max_context)
    prepared: list[PreparedAnswers] = []
    for prepare in prompts_for(model.with_adapter(leases[0].model)):
        prepared.append(await prepare())
        reservation.add(num_tokens=prepared[-1].num_tokens)
    return prepared


class TimeLimits:
    """The deadlines of one API request, on the event loop's clock: for its row, and for its whole answer."""

    def __init__(self, settings: ServerSettings, timeout_s: float | None) -> None:
        """`timeout_s`: the client's own limit. The server's limit holds for every request."""
        given = [seconds for seconds in (timeout_s, settings.request_timeout_s) if seconds]
        self.timeout_s = min(given, default=None)
        self._settings = settings
        now_s = asyncio.get_running_loop().time()
        self.end_s = None if self.timeout_s is None else now_s + self.timeout_s
        self.row_s = now_s + settings.queue_timeout_s if settings.queue_timeout_s else None

    @asynccontextmanager
    async def preparing(self) -> AsyncIterator[None]:
        """The time to load images, render and tokenize. Raises ApiError if there is none left."""
        deadlines_s = [deadline_s for deadline_s in (self.end_s, self.row_s) if deadline_s is not None]
        time_limit = asyncio.timeout_at(min(deadlines_s, default=None))
        try:
            async with time_limit:
                yield
        except TimeoutError:
            if not time_limit.expired():
                raise
            if time_limit.when() == self.end_s:
                raise timeout_error(self.timeout_message) from None
            raise queue_timeout_error() from None

    @property
    def timeout_message(self) -> str:
        limit_s = self._settings.request_timeout_s
        most = f", at most {limit_s:g} s, the limit of this server (--request-timeout)" if limit_s else ""
        return (
            f"the answer was not complete within {self.timeout_s:g} s. Ask for fewer tokens, or set a larger "
            f"timeout{most}"
        )


class Answers:
    """All choices of one API request. Iterate `events` once, and `close` at the end or to give up."""

    def __init__(
        self,
        api: str,
        model: str,
        arrived_s: float,
        streams: Sequence[EventStream],
        live: LiveRequests,
        reservation: Reservation,
        limits: TimeLimits,
        lease: Lease[ServedModel],
    ) -> None:
        self.api = api
        self.model = model  # the name that the answer carries
        self.served = lease.model
        self.arrived_s = arrived_s  # before the prompt was rendered
        self.request_id = current_request_id.get()
        self.started_s = time.perf_counter()
        self.choices = [ChoiceState(stream.request_id, len(stream.prompt_ids)) for stream in streams]
        self._streams = streams
        self._live = live
        self._reservation = reservation
        self._lease = lease  # until `close`
        self._queue: asyncio.Queue[tuple[int, ChatEvent]] = asyncio.Queue(MAX_QUEUED_EVENTS)
        self._limits = limits
        self._queue_timer: asyncio.TimerHandle | None = None
        if limits.row_s is not None:  # rows are given in order: the first choice gets the first one
            loop = asyncio.get_running_loop()
            self._queue_timer = loop.call_at(limits.row_s, streams[0].abort_if_waiting)
        self._pumps = [asyncio.create_task(self._pump(i, stream)) for i, stream in enumerate(streams)]
        live.answers[id(self)] = self

    @property
    def num_generated(self) -> int:
        """Tokens of all choices so far, read or not."""
        return sum(stream.num_generated for stream in self._streams)

    @property
    def num_images(self) -> int:
        """Images of the (first) prompt, frames of videos included."""
        return self._streams[0].num_images

    def num_prefilled(self, choice: int) -> int:
        """Tokens of a choice's prompt that are computed."""
        return self._streams[choice].num_prefilled

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
        if self._queue_timer is not None:
            self._queue_timer.cancel()
        for pump in self._pumps:
            pump.cancel()
        for stream, state in zip(self._streams, self.choices, strict=True):
            if state.finished is None:
                stream.abort()
        if self._live.answers.pop(id(self), None) is not None:
            self._reservation.release()
            self._lease.release()
            self._reservation.usage.count_tokens(self.num_generated)
            note_answers(summary_of(self))
            for state in self.choices:
                self._live.metrics.count_answer(self.api, state.finished)
            if self._live.tracing is not None:
                self._live.tracing.record(self)

    async def _merged(self) -> AsyncIterator[tuple[int, ChatEvent]]:
        num_running = len(self._streams)
        while num_running:
            choice, event = await self._queue.get()
            self._measure(self.choices[choice], event)
            if isinstance(event, Finished):
                num_running -= 1
                if error := failure_of(event):
                    note_refusal(error.reason)
            yield choice, event

    async def _pump(self, choice: int, stream: EventStream) -> None:
        last: ChatEvent = Finished("cancelled", Usage(), error="the stream ended without a Finished event")
        try:
            async with asyncio.timeout_at(self._limits.end_s) as time_limit:
                async for event in stream:
                    await self._queue.put((choice, event))
                    if isinstance(event, Finished):
                        return
        except Exception:
            if time_limit.expired():
                stream.abort()
                last = Finished("timeout", Usage(), error=self._limits.timeout_message)
            else:  # a fault in the chat service: the client still gets a last event
                log.exception("stream %s failed", stream.request_id)
                last = Finished("error", Usage())
        await self._queue.put((choice, last))

    def _measure(self, state: ChoiceState, event: ChatEvent) -> None:
        now_s = time.perf_counter()
        if isinstance(event, Finished):
            state.finished = event
            if event.error is not None and event.reason != "timeout":
                log.error("answer %s failed: %s", state.engine_id, event.error)
            return
        if isinstance(event, (Logprobs, PromptLogprobs, TokenOrigins, PromptProgress)):
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
    if finished.reason == "queue_timeout":
        return queue_timeout_error()
    if finished.reason == "timeout":
        return timeout_error(finished.error or "the answer was not complete in time")
    if finished.reason == "error":
        if finished.is_client_error:
            return ApiError(400, finished.error or "the answer could not be finished")
        return internal_error(current_request_id.get())
    return None


def queue_timeout_error() -> ApiError:
    message = "the request waited too long for a free row (--queue-timeout). Try again later."
    return ApiError(503, message, headers={"Retry-After": "5"}, reason="queue_timeout")


def timeout_error(message: str) -> ApiError:
    # The header is for OpenAI's and Anthropic's clients: a second try would take as long.
    headers = {"x-should-retry": "false"}
    return ApiError(504, message, code="timeout", headers=headers, reason="request_timeout")
