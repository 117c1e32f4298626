"""Owns a chat request for asyncio: load images, render, validate, queue, and read the answer as events.

Must not know HTTP. Rendering and validation run on one worker thread: they never block the event loop, and
the tokenizer never encodes two texts at once. Grammars are compiled on other threads.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from outrider.chat.conversation import ChatRequest, ImagePart, MediaPart, Part
from outrider.chat.events import ChatEvent
from outrider.chat.output_parser import finished_event
from outrider.chat.prompt_limit import num_characters
from outrider.chat.renderer import ChatPrompt, ChatRenderer
from outrider.chat.validation import validated
from outrider.engine.async_engine import AsyncEngine, AsyncStream
from outrider.engine.validation import ValidatedRequest
from outrider.media.image_reader import ProcessedImage
from outrider.media.loader import MediaItem, MediaLoader
from outrider.request import SamplingParams

NUM_GRAMMAR_THREADS = 4  # chosen by hand; they mostly wait for the grammar child

T = TypeVar("T")

LONG_PROMPT = 100_000  # characters: it takes a tenth of a second or more to encode. Chosen by hand


class ChatService:
    """The chat of one model: `start` an answer, `prepare` several, `count_tokens`."""

    def __init__(
        self,
        engine: AsyncEngine,
        renderer: ChatRenderer,
        media_loader: MediaLoader[ProcessedImage] | None = None,
    ) -> None:
        """`media_loader`: None for a model that reads text only."""
        self._engine = engine
        self._renderer = renderer
        self._media_loader = media_loader
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-chat")
        self._long_prompts = asyncio.Lock()
        self._grammar_threads = ThreadPoolExecutor(NUM_GRAMMAR_THREADS, thread_name_prefix="outrider-grammar")

    async def start(self, request: ChatRequest) -> ChatStream:
        """Queue one answer to a conversation. Raises InvalidRequest, as `prepare` does."""
        (stream,) = (await self.prepare(request)).start()
        return stream

    async def prepare(self, request: ChatRequest, num_answers: int = 1) -> PreparedAnswers:
        """Render and validate a conversation once for all its answers. Nothing is queued.

        Raises InvalidRequest if the conversation cannot be served.
        """
        size = self._checked_size(request)
        request = await self.with_images(request)
        return await self._prepare(partial(self._renderer.render, request), size, num_answers)

    async def prepare_text(
        self, prompt: str | Sequence[int], params: SamplingParams, num_answers: int = 1
    ) -> PreparedAnswers:
        """The same for a bare prompt. Its streams have text, logprobs and the end."""
        render = partial(self._renderer.render_text, prompt, params)
        return await self._prepare(render, self._checked_size(prompt), num_answers)

    async def count_tokens(self, request: ChatRequest) -> int:
        """The number of tokens of the request's prompt, as an answer's usage counts them."""
        return len(await self.prompt_ids(request))

    async def prompt_ids(self, prompt: ChatRequest | str, add_special_tokens: bool = True) -> Sequence[int]:
        """The tokens of a conversation, or of a bare prompt. Raises InvalidRequest."""
        size = self._checked_size(prompt)
        if isinstance(prompt, str):
            async with self._turn(size):
                return await self._off_loop(self._renderer.text_ids, prompt, add_special_tokens)
        prompt = await self.with_images(prompt)
        async with self._turn(size):
            return (await self._off_loop(self._renderer.render, prompt)).ids

    async def with_images(self, request: ChatRequest) -> ChatRequest:
        """The request with its images loaded."""
        parts = [part for m in request.messages for part in m.content if isinstance(part, MediaPart)]
        items = [MediaItem(part.kind, part.source) for part in parts if part.kind != "audio"]
        if self._media_loader is None or not parts or len(items) < len(parts):
            return request  # the renderer refuses what is not loaded
        loaded = iter(await self._media_loader.load(items))

        def load(part: Part) -> Part:
            return ImagePart(tuple(next(loaded))) if isinstance(part, MediaPart) else part

        messages = [replace(m, content=tuple(load(part) for part in m.content)) for m in request.messages]
        return replace(request, messages=messages)

    def close(self) -> None:
        """End the service's threads. The engine stays open."""
        self._thread.shutdown(wait=False)
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)
        if self._media_loader is not None:
            self._media_loader.close()

    def _checked_size(self, prompt: ChatRequest | str | Sequence[int]) -> int:
        """Characters or token ids of a prompt. Raises InvalidRequest for a text that is far too long."""
        if not isinstance(prompt, (ChatRequest, str)):
            return len(prompt)
        size = len(prompt) if isinstance(prompt, str) else num_characters(prompt)
        self._renderer.limit.check_characters(size)
        return size

    def _turn(self, size: int) -> AbstractAsyncContextManager[object]:
        """Long prompts take turns, so that a short one never waits for more than one of them."""
        return self._long_prompts if size > LONG_PROMPT else nullcontext()

    async def _prepare(
        self, render: Callable[[], ChatPrompt], size: int, num_answers: int
    ) -> PreparedAnswers:
        async with self._turn(size):
            prompt, first = await self._off_loop(self._render, render)
        if first is None:
            loop = asyncio.get_running_loop()
            check = partial(validated, prompt, self._validate)
            prompt, first = await loop.run_in_executor(self._grammar_threads, check)
        assert first is not None
        others = [
            first.for_answer(uuid.uuid4().hex, prompt.params.for_answer(i)) for i in range(1, num_answers)
        ]
        count_tokens = partial(self._off_loop, self._renderer.count_tokens)
        return PreparedAnswers(self._engine, prompt, [first, *others], count_tokens)

    def _render(self, render: Callable[[], ChatPrompt]) -> tuple[ChatPrompt, ValidatedRequest | None]:
        """The prompt, and the validated request if it has no grammar: that one may take long to compile."""
        prompt = render()
        return prompt, None if prompt.params.grammar is not None else self._validate(prompt)

    def _validate(self, prompt: ChatPrompt) -> ValidatedRequest:
        return self._engine.engine.validate(
            prompt.ids, prompt.params, continues_prompt=prompt.continues_prompt, media=prompt.media
        )

    async def _off_loop(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)


class PreparedAnswers:
    """The answers to one prompt, rendered and validated. `start` queues them."""

    def __init__(
        self,
        engine: AsyncEngine,
        prompt: ChatPrompt,
        requests: Sequence[ValidatedRequest],
        count_tokens: Callable[[str], Awaitable[int]],
    ) -> None:
        self.num_tokens = len(prompt.ids) * len(requests)
        self._new_stream = partial(ChatStream, engine, prompt, count_tokens=count_tokens)
        self._requests = requests

    def start(self) -> list[ChatStream]:
        """One stream per answer. If one cannot be queued, none runs."""
        streams: list[ChatStream] = []
        try:
            for request in self._requests:
                streams.append(self._new_stream(validated=request))
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        return streams


class ChatStream:
    """The events of one answer: an async iterator that ends with Finished.

    Leaving the iteration early aborts the request. Use the stream as a context manager if it may not be read.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        prompt: ChatPrompt,
        validated: ValidatedRequest,
        count_tokens: Callable[[str], Awaitable[int]],
    ) -> None:
        self.prompt_ids = prompt.ids
        self.num_images = prompt.num_images  # frames of videos included
        self._deltas = engine.submit(validated)
        # The generator holds no reference to this stream: dropping the stream ends generator and request.
        self._events = _read(engine, self._deltas, prompt, count_tokens)

    @property
    def request_id(self) -> str:
        return self._deltas.request_id

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far, read or not."""
        return self._deltas.num_tokens

    @property
    def num_prefilled(self) -> int:
        """Tokens of the prompt that are computed."""
        return self._deltas.num_prefilled

    def __aiter__(self) -> AsyncIterator[ChatEvent]:
        return self

    async def __anext__(self) -> ChatEvent:
        return await self._events.__anext__()

    async def __aenter__(self) -> ChatStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()

    async def aclose(self) -> None:
        self.abort()

    def abort(self) -> None:
        """Stop the answer before the next step; the stream ends. An ended answer is left as it is."""
        self._deltas.abort()

    def abort_if_waiting(self) -> None:
        """End the answer with the reason "queue_timeout", unless its request has got a row."""
        self._deltas.abort_if_waiting()


async def _read(
    engine: AsyncEngine,
    deltas: AsyncStream,
    prompt: ChatPrompt,
    count_tokens: Callable[[str], Awaitable[int]],
) -> AsyncIterator[ChatEvent]:
    parser, with_logprobs = prompt.new_parser(), prompt.params.logprobs is not None
    is_stopped = False
    try:
        async for delta in deltas:
            for event in parser.read(delta, with_logprobs):
                yield event
            if delta.finish_reason is not None:
                num_reasoning = await count_tokens(parser.reasoning) if parser.reasoning else 0
                yield finished_event(delta, parser, num_reasoning)
            elif parser.is_complete and not is_stopped:
                is_stopped = True  # the last delta, with the statistics, is still read
                engine.abort(deltas.request_id)
    finally:
        deltas.abort()
