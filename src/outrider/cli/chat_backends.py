"""The backends of `outrider chat`: a model in this process, or a server (chat_server.py)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from outrider.chat.conversation import ChatRequest, Message
from outrider.chat.events import ChatEvent, Finished
from outrider.request import InvalidRequest, SamplingParams

if TYPE_CHECKING:
    from outrider.llm import LLM


T = TypeVar("T")


class ChatFailed(RuntimeError):
    """There is no complete answer. The message gives the reason."""


class Backend(Protocol):
    @property
    def greeting(self) -> str: ...

    def answer(self, messages: Sequence[Message]) -> Generator[ChatEvent, None, None]:
        """The events of an answer; the last one is Finished. Closing the generator stops the answer."""
        ...


class EventLoopThread:
    """An event loop on its own thread. The main thread only waits for events, so Ctrl-C ends the wait."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-chat-loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for the result. An interrupted wait cancels the work."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def iterate(self, events: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """The events as they come. Closing this generator closes `events`."""
        arrived: SimpleQueue[tuple[T] | None] = SimpleQueue()

        async def read() -> None:
            try:
                async for event in events:
                    arrived.put((event,))
            finally:
                await events.aclose()

        reading = asyncio.run_coroutine_threadsafe(read(), self._loop)
        reading.add_done_callback(lambda _: arrived.put(None))
        try:
            while (item := arrived.get()) is not None:
                yield item[0]
            reading.result()
        finally:
            reading.cancel()

    def close(self) -> None:
        self.run(_close_everything())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _close_everything() -> None:
    """End all other tasks and async generators.

    A generator that was not read to its end is closed by a task of its own, so tasks are ended twice.
    """
    await _cancel_other_tasks()
    await asyncio.get_running_loop().shutdown_asyncgens()
    await _cancel_other_tasks()


async def _cancel_other_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class LocalBackend:
    """Answers of a model in this process."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        from outrider.chat.service import ChatService

        self._facts = llm.engine.facts
        self._params = params
        self._service = ChatService(llm.async_engine, llm.renderer)
        self._loop = EventLoopThread()

    @property
    def greeting(self) -> str:
        facts = self._facts
        drafters = {
            "mtp": f"MTP head {facts.head}",
            "model": f"draft model {facts.draft_model}",
            "ngram": "n-gram lookup",
            "none": "no drafts",
        }
        return (
            f"{facts.name}: {facts.dtype} on {facts.device}, {drafters[facts.drafter]}, "
            f"context of {facts.max_context} tokens."
        )

    def answer(self, messages: Sequence[Message]) -> Generator[ChatEvent, None, None]:
        return self._loop.iterate(self._events(ChatRequest(tuple(messages), self._params)))

    async def _events(self, request: ChatRequest) -> AsyncGenerator[ChatEvent, None]:
        try:
            stream = await self._service.start(request)
        except InvalidRequest as error:
            raise ChatFailed(str(error)) from None
        async with stream:
            async for event in stream:
                if isinstance(event, Finished) and event.reason in ("error", "cancelled"):
                    raise ChatFailed(event.error or "the answer was cancelled")
                yield event
                if isinstance(event, Finished):
                    return

    def close(self) -> None:
        self._service.close()
        self._loop.close()
