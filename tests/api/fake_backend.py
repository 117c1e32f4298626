"""A chat service with scripted answers, and an application around it. No model, no thread, no clock."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx

from outrider.api.app import Server, create_server
from outrider.api.model_card import NO_CARD, ModelCard
from outrider.api.settings import ServerSettings
from outrider.chat.conversation import ChatRequest
from outrider.chat.events import (
    ChatEvent,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from outrider.engine.validation import ModelFacts
from outrider.request import SamplingParams

USAGE = Usage(num_prompt=7, num_cached=3, num_generated=5, num_reasoning=2, num_accepted=1, num_rejected=2)
HELLO: tuple[ChatEvent, ...] = (TextDelta("Hello"), TextDelta(" wörld"), Finished("stop", USAGE))
THOUGHT: tuple[ChatEvent, ...] = (ReasoningDelta("Hm"), ReasoningDelta("m."), *HELLO)
CALLS: tuple[ChatEvent, ...] = (
    TextDelta("Let me look."),
    ToolCallStarted(0, "call_a", "weather"),
    ToolCallArguments(0, '{"city":'),
    ToolCallArguments(0, '"Oslo"}'),
    ToolCallEnded(0, '{"city":"Oslo"}'),
    ToolCallStarted(1, "call_b", "time"),
    ToolCallArguments(1, "{}"),
    ToolCallEnded(1, "{}"),
    Finished("tool_calls", USAGE),
)
CUT: tuple[ChatEvent, ...] = (TextDelta("Hel"), Finished("length", USAGE))
FAILED: tuple[ChatEvent, ...] = (TextDelta("Hel"), Finished("error", USAGE, error="the model failed: boom"))

FACTS = ModelFacts(
    name="models/tiny",
    vocab_size=113,
    max_context=256,
    eos_ids=frozenset({0}),
    drafter="mtp",
    dtype="float32",
)


class Gate:
    """Lets the first `num_events` events of all streams pass, and holds the others until `open`."""

    def __init__(self, num_events: int) -> None:
        self._num_left = num_events
        self.holds = asyncio.Event()
        self._is_open = asyncio.Event()

    async def __call__(self) -> None:
        if self._num_left > 0:
            self._num_left -= 1
        else:
            self.holds.set()
            await self._is_open.wait()

    def open(self) -> None:
        self._is_open.set()


async def no_gate() -> None:
    await asyncio.sleep(0)


class FakeStream:
    def __init__(
        self, request_id: str, events: Sequence[ChatEvent], gate: Callable[[], Awaitable[None]] = no_gate
    ) -> None:
        self.request_id = request_id
        self.prompt_ids = tuple(range(7))
        self.aborted = False
        self.num_generated = USAGE.num_generated
        self.num_prefilled = 0
        self.num_images = 0
        self._events = events
        self._gate = gate

    async def __aiter__(self) -> AsyncIterator[ChatEvent]:
        for event in self._events:
            await self._gate()
            if self.aborted:
                yield Finished("cancelled", USAGE)
                return
            yield event

    def abort(self) -> None:
        self.aborted = True

    def abort_if_waiting(self) -> None:
        """Streams of this backend have their row at once."""


@dataclass
class FakeAnswers:
    starts: Sequence[Callable[[], FakeStream]]

    @property
    def num_tokens(self) -> int:
        return 7 * len(self.starts)

    def start(self) -> list[FakeStream]:
        return [start() for start in self.starts]


@dataclass
class FakeBackend:
    """Answers with `events` or `answer(request)`. `gate` is awaited before each event."""

    events: Sequence[ChatEvent] = HELLO
    answer: Callable[[Any], Sequence[ChatEvent]] | None = None
    gate: Callable[[], Awaitable[None]] = no_gate
    failure: Exception | None = None
    requests: list[ChatRequest] = field(default_factory=list)
    completions: list[tuple[str | Sequence[int], SamplingParams]] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)
    num_prepared: int = 0

    async def prepare(self, request: ChatRequest, num_answers: int = 1) -> FakeAnswers:
        self.num_prepared += 1
        each = [replace(request, params=request.params.for_answer(i)) for i in range(num_answers)]
        return FakeAnswers([partial(self.start, one) for one in each])

    async def prepare_text(
        self, prompt: str | Sequence[int], params: SamplingParams, num_answers: int = 1
    ) -> FakeAnswers:
        self.num_prepared += 1
        each = [params.for_answer(i) for i in range(num_answers)]
        return FakeAnswers([partial(self.complete, prompt, one) for one in each])

    def start(self, request: ChatRequest) -> FakeStream:
        self.requests.append(request)
        return self._stream(request)

    def complete(self, prompt: str | Sequence[int], params: SamplingParams) -> FakeStream:
        self.completions.append((prompt, params))
        return self._stream((prompt, params))

    async def count_tokens(self, request: ChatRequest) -> int:
        self.requests.append(request)
        return sum(len(message.text) for message in request.messages)

    async def prompt_ids(self, prompt: ChatRequest | str, add_special_tokens: bool) -> list[int]:
        """A token for each character; 0 stands for the special tokens of a bare prompt."""
        if isinstance(prompt, str):
            return [*([0] if add_special_tokens else []), *map(ord, prompt)]
        self.requests.append(prompt)
        return [ord(character) for message in prompt.messages for character in message.text]

    def _stream(self, request: Any) -> FakeStream:
        if self.failure is not None:
            raise self.failure
        events = self.events if self.answer is None else self.answer(request)
        stream = FakeStream(f"req-{len(self.streams)}", events, self.gate)
        self.streams.append(stream)
        return stream


class FakeTokenizer:
    """Token i is the i-th letter, up to a thousand; token 26 is a byte of a torn character."""

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join("\ufffd" if i == 26 else chr(97 + i % 1000) for i in token_ids)

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return "<0xC3>" if token_id == 26 else chr(97 + token_id % 1000)


def settings(**changes: Any) -> ServerSettings:
    """`Client` calls the server by the name "test"."""
    defaults = {"served_model_names": ("tiny", "other"), "allowed_hosts": ("test",)}
    return ServerSettings(**(defaults | changes))


def server(backend: FakeBackend, embedder: Any = None, card: ModelCard = NO_CARD, **changes: Any) -> Server:
    """With ids that count and a clock that stands still, so that answers repeat to the byte."""
    numbers = itertools.count(1)
    return create_server(
        backend,
        FACTS,
        FakeTokenizer(),
        settings(**changes),
        now_s=lambda: 1700000000.0,
        started_s=1700000000.0,
        new_id=lambda prefix: f"{prefix}{next(numbers)}",
        embedder=embedder,
        card=card,
    )


class Client:
    """Requests to an application in this process, one event loop each."""

    def __init__(self, app_or_server: Any, **headers: str) -> None:
        self.app = getattr(app_or_server, "app", app_or_server)
        self._headers = headers

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://test", headers=self._headers
            ) as http:
                return await http.request(method, path, **kwargs)

        return asyncio.run(send())

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return self.request("POST", path, **({"json": body} | kwargs))

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.request("GET", path, **kwargs)


USER = [{"role": "user", "content": "Hi"}]
