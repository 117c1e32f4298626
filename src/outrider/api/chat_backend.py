"""The part of the chat service (chat/service.py) that the routes use. Tests replace it by a scripted one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from outrider.chat.conversation import ChatRequest
from outrider.chat.events import ChatEvent
from outrider.request import SamplingParams


class EventStream(Protocol):
    """One answer of the chat service. Its last event is a Finished."""

    @property
    def request_id(self) -> str: ...

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far, read or not."""
        ...

    @property
    def num_prefilled(self) -> int:
        """Tokens of the prompt that are computed."""
        ...

    @property
    def num_images(self) -> int: ...

    def __aiter__(self) -> AsyncIterator[ChatEvent]: ...

    def abort(self) -> None: ...

    def abort_if_waiting(self) -> None:
        """End with a Finished("queue_timeout"), unless the request has got a row."""
        ...


class PreparedAnswers(Protocol):
    """The answers to one prompt, rendered and validated, not queued."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, once for each answer."""
        ...

    def start(self) -> Sequence[EventStream]: ...


class ChatBackend(Protocol):
    """Every call raises InvalidRequest for a request that it cannot serve, before any token is computed."""

    async def prepare(self, request: ChatRequest, num_answers: int = 1) -> PreparedAnswers: ...

    async def prepare_text(
        self, prompt: str | Sequence[int], params: SamplingParams, num_answers: int = 1
    ) -> PreparedAnswers: ...

    async def count_tokens(self, request: ChatRequest) -> int: ...

    async def prompt_ids(self, prompt: ChatRequest | str, add_special_tokens: bool) -> Sequence[int]: ...
