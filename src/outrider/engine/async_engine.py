"""The engine for asyncio: submit, stream, abort. The event loop never waits for a forward pass."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable

from outrider.engine.engine import Engine
from outrider.engine.outbox import Outbox
from outrider.engine.sequence import Delta
from outrider.prompt_media import PromptMedia
from outrider.request import SamplingParams


class AsyncStream:
    """The deltas of one request, as an async iterator. Aborted when it is closed, cancelled or forgotten."""

    def __init__(self, engine: Engine, request_id: str, outbox: Outbox) -> None:
        self.request_id = request_id
        self._engine = engine
        self._outbox = outbox
        self._finished = False
        self._something_came = something_came = asyncio.Event()
        loop = asyncio.get_running_loop()
        outbox.call_on_put(lambda: _wake(loop, something_came))  # not self: the engine holds it

    def __del__(self) -> None:
        self.abort()

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
        """Free the row before the next step; the stream ends. Harmless when it has ended already."""
        if not self._finished:
            self._finished = True
            self._engine.cancel(self.request_id, self._outbox)


class AsyncEngine:
    """An Engine seen from an event loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def submit(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams,
        *,
        continues_prompt: bool = True,
        request_id: str | None = None,
        media: PromptMedia | None = None,
    ) -> AsyncStream:
        """Queue a request; raises InvalidRequest at once if it cannot be served."""
        started = self.engine.submit(
            prompt_ids, params, continues_prompt=continues_prompt, request_id=request_id, media=media
        )
        return AsyncStream(self.engine, *started)

    def abort(self, request_id: str) -> None:
        self.engine.cancel(request_id)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.engine.close)


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
        loop.call_soon_threadsafe(event.set)
