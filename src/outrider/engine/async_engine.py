"""The engine for asyncio: the event loop never waits for a forward pass or for the check of a request.

An `AsyncStream` is the reader's end of one request. It reads the request's outbox, and whoever leaves it ends
the request.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from functools import partial

from outrider.engine.engine import Engine
from outrider.engine.loop import Outbox
from outrider.engine.sequence import Delta
from outrider.engine.validation import ValidatedRequest
from outrider.prompt_media import PromptMedia
from outrider.request import SamplingParams


class WakeUps:
    """Sets events of one event loop from other threads.

    To wake a loop takes as long as to commit a token. So the events that come before the loop runs share one
    call: often those of all rows of a step.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._due: list[asyncio.Event] = []  # to be set by the call that is on its way

    def wake(self, event: asyncio.Event) -> None:
        with self._lock:
            self._due.append(event)
            if len(self._due) > 1:
                return
        try:
            self.loop.call_soon_threadsafe(self._set_all)
        except RuntimeError:  # the loop is closed, so there is no reader
            self._take_due()

    def _set_all(self) -> None:
        for event in self._take_due():
            event.set()

    def _take_due(self) -> list[asyncio.Event]:
        with self._lock:
            due, self._due = self._due, []
        return due


class AsyncStream:
    """The deltas of one request, as an async iterator.

    Closing, cancelling or dropping the stream aborts the request.
    """

    def __init__(self, engine: Engine, request_id: str, outbox: Outbox, wake_ups: WakeUps) -> None:
        self.request_id = request_id
        self._engine = engine
        self._outbox = outbox
        self._finished = False
        self._something_came = something_came = asyncio.Event()
        # The engine holds this callback, so it must not hold the stream: a dropped stream must be collected.
        outbox.call_on_put(lambda: wake_ups.wake(something_came))

    def __del__(self) -> None:
        self.abort()

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far, read or not."""
        return self._outbox.num_tokens

    @property
    def num_prefilled(self) -> int:
        """Tokens of the prompt that are computed."""
        return self._outbox.num_prefilled

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._finished:
            raise StopAsyncIteration
        try:
            while (delta := self._outbox.take_now()) is None:
                self._something_came.clear()
                if (delta := self._outbox.take_now()) is not None:
                    break
                await self._something_came.wait()
        except asyncio.CancelledError:
            self.abort()
            raise
        self._finished = delta.finish_reason is not None
        return delta

    async def aclose(self) -> None:
        self.abort()

    def abort(self) -> None:
        """End the stream and free the row before the next step. An ended stream is left as it is."""
        if not self._finished:
            self._finished = True
            self._engine.cancel(self.request_id, self._outbox)

    def abort_if_waiting(self) -> None:
        """End the stream with the reason "queue_timeout", unless the request has got a row."""
        if not self._finished:
            self._engine.cancel_if_waiting(self.request_id, self._outbox)


class AsyncEngine:
    """An Engine for use from an event loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._wake_ups: WakeUps | None = None  # of the event loop that submitted last

    async def start(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams,
        *,
        continues_prompt: bool = True,
        request_id: str | None = None,
        media: PromptMedia | None = None,
    ) -> AsyncStream:
        """Validate a request on a worker thread, then queue it. Raises InvalidRequest."""
        validate = partial(self.engine.validate, continues_prompt=continues_prompt, media=media)
        return self.submit(await asyncio.to_thread(validate, prompt_ids, params, request_id=request_id))

    def submit(self, validated: ValidatedRequest) -> AsyncStream:
        """Queue a request that `Engine.validate` has returned."""
        loop = asyncio.get_running_loop()
        if self._wake_ups is None or self._wake_ups.loop is not loop:
            self._wake_ups = WakeUps(loop)
        return AsyncStream(self.engine, validated.id, self.engine.submit(validated), self._wake_ups)

    def abort(self, request_id: str) -> None:
        self.engine.cancel(request_id)

    async def close(self) -> None:
        await asyncio.to_thread(self.engine.close)
