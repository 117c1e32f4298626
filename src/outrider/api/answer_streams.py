"""Streams of answers: they begin when the answers have started, or earlier if the preparation takes long.

A request that is refused within the first second gets its HTTP status. After that second the stream begins
with a keep-alive, and an error is an event of the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any

from outrider.api import sse
from outrider.api.answers import Answers
from outrider.api.errors import ApiError, ClientGone, api_error_of
from outrider.api.middleware import current_request_id, note_refusal

FramesOf = Callable[[Answers], AsyncIterator[bytes]]
FailureFrames = Callable[[ApiError], Iterable[bytes]]


async def stream_answers(
    starting: Coroutine[Any, Any, Answers],
    frames_of: FramesOf,
    failure_frames: FailureFrames,
    keep_alive_s: float,
    keep_alive: bytes = sse.COMMENT,
    content_type: str = sse.EVENT_STREAM,
) -> sse.EventStreamResponse:
    """Start the answers and stream them. Raises what `starting` raises before the stream begins.

    `failure_frames`: the whole stream of answers that could not be started, in the form of the API.
    """
    started = asyncio.create_task(starting)
    try:
        await asyncio.wait({started}, timeout=min(sse.FIRST_KEEP_ALIVE_S, keep_alive_s))
    except BaseException:
        started.cancel()
        raise
    settings = keep_alive_s, keep_alive, content_type
    if started.done():
        answers = started.result()
        return sse.EventStreamResponse(frames_of(answers), answers.close, *settings)
    unstarted = _UnstartedStream(started, frames_of, failure_frames, keep_alive)
    return sse.EventStreamResponse(unstarted.frames(), unstarted.close, *settings)


class _UnstartedStream:
    """A stream that has begun before its answers have started."""

    def __init__(
        self,
        started: asyncio.Task[Answers],
        frames_of: FramesOf,
        failure_frames: FailureFrames,
        keep_alive: bytes,
    ) -> None:
        self._started = started
        self._frames_of = frames_of
        self._failure_frames = failure_frames
        self._keep_alive = keep_alive

    async def frames(self) -> AsyncIterator[bytes]:
        yield self._keep_alive
        try:
            answers = await self._started
        except ClientGone:
            return
        except Exception as failure:
            error = api_error_of(failure, current_request_id.get())
            note_refusal(error.reason)
            for frame in self._failure_frames(error):
                yield frame
            return
        async for frame in self._frames_of(answers):
            yield frame

    def close(self) -> None:
        self._started.cancel()
        if self._started.done() and not self._started.cancelled() and self._started.exception() is None:
            self._started.result().close()
