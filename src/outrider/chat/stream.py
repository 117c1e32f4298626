"""Owns one answer while it is read: engine deltas in, events out. Must not know how the prompt came about."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from outrider.chat.events import ChatEvent, Finished, FinishedReason, Logprobs, Usage
from outrider.chat.output_parser import OutputParser
from outrider.engine.async_engine import AsyncEngine, AsyncStream
from outrider.engine.sequence import Delta, Stats
from outrider.prompt_media import PromptMedia
from outrider.request import SamplingParams

CountTokens = Callable[[str], Awaitable[int]]


@dataclass(frozen=True)
class Prepared:
    """A request that is ready to be queued."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    parser: OutputParser
    continues_prompt: bool  # the answer's text goes on from the prompt's
    media: PromptMedia | None = None  # the prompt's pictures


class ChatStream:
    """The events of one answer: an async iterator that ends with Finished.

    Leaving it early aborts the request. Use it as a context manager where it may not be read at all.
    """

    def __init__(self, engine: AsyncEngine, prepared: Prepared, count_tokens: CountTokens) -> None:
        self.prompt_ids = prepared.prompt_ids
        self._deltas = engine.submit(
            prepared.prompt_ids,
            prepared.params,
            continues_prompt=prepared.continues_prompt,
            media=prepared.media,
        )
        # The generator does not hold the stream, so it ends, and the request too, when the stream is dropped.
        self._events = _read(engine, self._deltas, prepared, count_tokens)

    @property
    def request_id(self) -> str:
        return self._deltas.request_id

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
        """Stop the answer before the next step; the stream ends. Harmless when it is over already."""
        self._deltas.abort()


async def _read(
    engine: AsyncEngine, deltas: AsyncStream, prepared: Prepared, count_tokens: CountTokens
) -> AsyncIterator[ChatEvent]:
    parser = prepared.parser
    is_stopped = False
    try:
        async for delta in deltas:
            for event in parser.push(delta.text):
                yield event
            if prepared.params.logprobs is not None and delta.logprobs:
                yield Logprobs(delta.logprobs)
            if delta.finish_reason is not None:
                for event in parser.finish():
                    yield event
                num_reasoning = await count_tokens(parser.reasoning) if parser.reasoning else 0
                yield _finished(delta, parser, num_reasoning)
            elif parser.is_complete and not is_stopped:
                is_stopped = True  # the end, with its statistics, is still read
                engine.abort(deltas.request_id)
    finally:
        deltas.abort()


def _finished(delta: Delta, parser: OutputParser, num_reasoning: int) -> Finished:
    stats = delta.stats or Stats()
    return Finished(
        reason=_reason(delta, parser),
        usage=_usage(stats, num_reasoning),
        stats=stats,
        stop_string=delta.stop_string,
        error=delta.error,
    )


def _reason(delta: Delta, parser: OutputParser) -> FinishedReason:
    """An answer that was cut short says so, even after a call."""
    assert delta.finish_reason is not None
    if parser.num_calls and (delta.finish_reason == "stop" or parser.is_complete):
        return "tool_calls"
    return delta.finish_reason


def _usage(stats: Stats, num_reasoning: int) -> Usage:
    num_accepted = sum(stats.accepted)
    return Usage(
        num_prompt=stats.num_prompt,
        num_cached=stats.num_cached,
        num_stored=stats.num_stored,
        num_generated=stats.num_generated,
        num_reasoning=min(num_reasoning, stats.num_generated),
        num_accepted=num_accepted,
        num_rejected=sum(stats.drafted) - num_accepted,
    )
