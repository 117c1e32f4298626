"""What the HTTP layer needs of the chat service: three calls and a stream of events.

A protocol, so that every route can be tested with a scripted backend.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from outrider.chat.conversation import ChatRequest
from outrider.chat.events import ChatEvent
from outrider.request import SamplingParams


class EventStream(Protocol):
    """One answer as it grows. Its last event is a Finished."""

    @property
    def request_id(self) -> str: ...

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...

    def __aiter__(self) -> AsyncIterator[ChatEvent]: ...

    def abort(self) -> None: ...


class ChatBackend(Protocol):
    """Raises InvalidRequest from any of its calls, before any work is done, for what it cannot serve."""

    async def start(self, request: ChatRequest) -> EventStream: ...

    async def with_images(self, request: ChatRequest) -> ChatRequest:
        """The request with its images loaded. A request for several answers loads its images once."""
        ...

    async def count_tokens(self, request: ChatRequest) -> int: ...

    async def complete(self, prompt: str | Sequence[int], params: SamplingParams) -> EventStream: ...
