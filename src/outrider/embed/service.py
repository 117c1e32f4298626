"""Embeddings and rerank scores for asyncio: reads texts into tokens, checks them, and waits for the vectors.

Owns one pooling model's engine and tokenizer, so that a server can hold several of these beside its chat
models. Must not know HTTP. Texts are encoded on one worker thread, never on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from outrider.embed.engine import EmbeddingEngine
from outrider.embed.tokenizer import EmbeddingTokenizer
from outrider.pooling import PoolingFacts, TokenInput, Vector
from outrider.request import InvalidRequest, PromptTooLong

T = TypeVar("T")

MAX_CHARACTERS_PER_TOKEN = (
    32  # of the model's limit; as for the prompts of chat models (chat/prompt_limit.py)
)
TEXTS_AT_ONCE = 64  # texts that the worker thread encodes before it looks at the next request; chosen by hand


class NotStarted(Exception):
    """The inputs waited too long for their first pass."""


class EmbeddingService:
    def __init__(self, engine: EmbeddingEngine, tokenizer: EmbeddingTokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-embed-text")

    @property
    def facts(self) -> PoolingFacts:
        return self._engine.facts

    async def read(
        self,
        inputs: Sequence[str | Sequence[int]],
        truncate: int | None,
        max_total: int,
        names: Sequence[str] = (),
    ) -> list[TokenInput]:
        """The inputs as tokens. Raises InvalidRequest, which names the input that cannot be read.

        `truncate`: cut inputs to so many tokens; None: an input over the model's limit is an error.
        `max_total`: most tokens of all inputs together. `names`: of the inputs in messages.
        """

        def read(i: int) -> TokenInput:
            return self._input(names[i] if names else f"input[{i}]", inputs[i], truncate)

        return await self._read(read, len(inputs), max_total)

    async def read_pairs(
        self, query: str, documents: Sequence[str], truncate: int | None, max_total: int
    ) -> list[TokenInput]:
        """The same for pairs of a query and a document. `truncate` cuts the documents."""

        def pair(i: int) -> TokenInput:
            name = f"documents[{i}], with the query,"
            self._check_characters(name, len(query) + len(documents[i]), truncate)
            text = self._cut(documents[i], truncate)
            return self._checked(name, self._tokenizer.encode_pair(query, text, truncate))

        return await self._read(pair, len(documents), max_total)

    async def embed(self, inputs: Sequence[TokenInput], start_within_s: float | None = None) -> list[Vector]:
        """One vector for each input. Raises NotStarted, EngineStopped, or what the model raised.

        Inputs whose waiter is cancelled are not computed.
        """
        job = self._engine.submit(inputs)
        waiting = asyncio.wrap_future(job.result)
        try:
            if start_within_s is not None:
                await asyncio.wait([waiting], timeout=start_within_s)
                if not job.has_started:
                    raise NotStarted
            return await waiting
        finally:
            job.abandon()
            waiting.cancel()

    async def text_ids(self, text: str, with_special: bool) -> tuple[int, ...]:
        """The tokens of a text, however long it is within the limit of characters."""
        self._check_characters("prompt", len(text), None)
        return (await self._off_loop(self._tokenizer.encode, text, None, with_special)).ids

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    # -- reading -----------------------------------------------------------------------------------------

    async def _read(self, read: Callable[[int], TokenInput], count: int, max_total: int) -> list[TokenInput]:
        found: list[TokenInput] = []
        for first in range(0, count, TEXTS_AT_ONCE):
            part = range(first, min(count, first + TEXTS_AT_ONCE))
            found += await self._off_loop(lambda part=part: [read(i) for i in part])
            if sum(map(len, found)) > max_total:
                raise InvalidRequest(
                    f"the inputs have more than {max_total:,} tokens together: send fewer in one request"
                )
        return found

    def _input(self, name: str, given: str | Sequence[int], truncate: int | None) -> TokenInput:
        if not isinstance(given, str):
            ids = given if truncate is None else given[:truncate]
            return self._checked(name, TokenInput(tuple(ids)))
        self._check_characters(name, len(given), truncate)
        return self._checked(name, self._tokenizer.encode(self._cut(given, truncate), truncate))

    def _cut(self, text: str, truncate: int | None) -> str:
        """What is far behind the limit is not even encoded."""
        return text if truncate is None else text[: MAX_CHARACTERS_PER_TOKEN * self.facts.max_tokens]

    def _check_characters(self, name: str, count: int, truncate: int | None) -> None:
        most = self.facts.max_tokens
        if truncate is None and count > MAX_CHARACTERS_PER_TOKEN * most:
            raise _too_long(name, f"{count:,} characters", most)

    def _checked(self, name: str, read: TokenInput) -> TokenInput:
        if not read.ids:
            raise InvalidRequest(f"{name} has no tokens: every input needs at least one")
        if len(read) > self.facts.max_tokens:
            raise _too_long(name, f"{len(read):,} tokens", self.facts.max_tokens)
        outside = next((i for i in read.ids if not 0 <= i < self.facts.vocab_size), None)
        if outside is not None:
            size = self.facts.vocab_size
            raise InvalidRequest(f"{name} has token id {outside}, outside the vocabulary of {size}")
        return read

    async def _off_loop(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)


def _too_long(name: str, size: str, most: int) -> PromptTooLong:
    return PromptTooLong(
        f"{name} has {size}, and the model reads {most:,} at most: shorten it, or send "
        "truncate_prompt_tokens: -1",
        size,
        most,
    )
