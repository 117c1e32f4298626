"""`outrider chat --url`: answers from a server, through /v1/chat/completions as a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from outrider.chat.conversation import Message
from outrider.chat.events import ChatEvent, Finished, ReasoningDelta, TextDelta, Usage
from outrider.chat_client import ChatChunk, ChatClient, ServerError
from outrider.cli.chat_backends import ChatFailed, EventLoopThread
from outrider.engine.sequence import Stats
from outrider.server_address import ServerAddress

SILENCE_S = 600.0  # seconds without a byte; chosen by hand: Outrider's streams send one every few seconds


class ServerBackend:
    """Answers of a server with OpenAI's API."""

    def __init__(self, address: ServerAddress, model: str | None, chosen: Mapping[str, Any]) -> None:
        """Without a model, the first one that the server lists. ChatFailed if there is none.

        `chosen`: the sampling parameters that requests carry. The server decides about the others.
        """
        self._address = address
        self._chosen = chosen
        self._client = ChatClient(address, "outrider-chat", SILENCE_S)
        self._loop = EventLoopThread()
        self._model = model or self._first_model()

    @property
    def greeting(self) -> str:
        return f"{self._model} at {self._address}."

    def answer(self, messages: Sequence[Message]) -> Generator[ChatEvent, None, None]:
        return self._loop.iterate(self._events(request_body(self._model, messages, self._chosen)))

    def close(self) -> None:
        self._loop.close()

    def _first_model(self) -> str:
        try:
            model = self._loop.run(self._client.first_model())
        except ServerError as error:
            raise ChatFailed(str(error)) from None
        if model is None:
            raise ChatFailed(f"{self._address} lists no model: is it a server with OpenAI's API?")
        return model

    async def _events(self, body: Mapping[str, Any]) -> AsyncGenerator[ChatEvent, None]:
        """The times in the last event are the client's."""
        started_s = time.perf_counter()
        first_s: float | None = None
        last = ChatChunk(started_s)
        usage: Mapping[str, Any] = {}
        finish_reason = None
        try:
            async with aclosing(self._client.stream_chat(body)) as chunks:
                async for last in chunks:
                    if first_s is None and (last.reasoning or last.text):
                        first_s = last.read_at_s
                    if last.reasoning:
                        yield ReasoningDelta(last.reasoning)
                    if last.text:
                        yield TextDelta(last.text)
                    finish_reason = last.finish_reason or finish_reason
                    usage = last.usage or usage
        except ServerError as error:
            raise ChatFailed(str(error)) from None
        counts = _usage(usage)
        stats = Stats(
            num_prompt=counts.num_prompt,
            num_generated=counts.num_generated,
            ttft_s=None if first_s is None else first_s - started_s,
            total_s=last.read_at_s - started_s,
        )
        yield Finished("length" if finish_reason == "length" else "stop", counts, stats)


def request_body(model: str, messages: Sequence[Message], chosen: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": message.role, "content": message.text} for message in messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        **chosen,
    }


def _usage(usage: Mapping[str, Any]) -> Usage:
    details = usage.get("completion_tokens_details")
    return Usage(
        num_prompt=_count(usage, "prompt_tokens"),
        num_generated=_count(usage, "completion_tokens"),
        num_reasoning=_count(details, "reasoning_tokens"),
        num_accepted=_count(details, "accepted_prediction_tokens"),
        num_rejected=_count(details, "rejected_prediction_tokens"),
    )


def _count(counts: object, name: str) -> int:
    value = counts.get(name) if isinstance(counts, Mapping) else None
    return value if isinstance(value, int) else 0
