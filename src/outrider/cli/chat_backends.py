"""The backends of `outrider chat`: a model in this process, or a server (chat_server.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Protocol

from outrider.chat.conversation import ChatRequest, Message
from outrider.chat.events import ChatEvent, Finished
from outrider.request import InvalidRequest, SamplingParams

if TYPE_CHECKING:
    from outrider.llm import LLM


class ChatFailed(RuntimeError):
    """There is no complete answer. The message gives the reason."""


class Backend(Protocol):
    @property
    def greeting(self) -> str: ...

    def answer(self, messages: Sequence[Message]) -> Generator[ChatEvent, None, None]:
        """The events of an answer; the last one is Finished. Closing the generator stops the answer."""
        ...


class LocalBackend:
    """Drives the chat service's event loop from event to event, so that Ctrl-C comes between two of them."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        from outrider.chat.service import ChatService

        self._facts = llm.engine.facts
        self._params = params
        self._service = ChatService(llm.async_engine, llm.renderer)
        self._loop = asyncio.Runner()

    @property
    def greeting(self) -> str:
        facts = self._facts
        drafters = {"mtp": f"MTP head {facts.head}", "ngram": "n-gram lookup", "none": "no drafts"}
        return (
            f"{facts.name}: {facts.dtype} on {facts.device}, {drafters[facts.drafter]}, "
            f"context of {facts.max_context} tokens."
        )

    def answer(self, messages: Sequence[Message]) -> Generator[ChatEvent, None, None]:
        try:
            stream = self._loop.run(self._service.start(ChatRequest(tuple(messages), self._params)))
        except InvalidRequest as error:
            raise ChatFailed(str(error)) from None
        try:
            is_finished = False
            while not is_finished:
                event = self._loop.run(stream.__anext__())
                is_finished = isinstance(event, Finished)
                if isinstance(event, Finished) and event.reason in ("error", "cancelled"):
                    raise ChatFailed(event.error or "the answer was cancelled")
                yield event
        finally:
            stream.abort()

    def close(self) -> None:
        self._service.close()
        self._loop.close()
