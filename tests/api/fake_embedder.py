"""A pooling model without a model: the vector of an input is made of its token ids, which are characters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from fake_backend import FACTS as MODEL_FACTS
from fake_backend import Client, FakeTokenizer, settings

from outrider.api.app import Server, create_server
from outrider.api.no_chat import NoChat
from outrider.pooling import PoolingFacts, PoolingKind, TokenInput, Vector
from outrider.request import InvalidRequest

DIMENSIONS = 8
FACTS = PoolingFacts("models/tiny", "embedding", DIMENSIONS, 5000, 113, "mean", True, pass_tokens=512)


@dataclass
class FakeEmbedder:
    kind: PoolingKind = "embedding"
    failure: Exception | None = None
    gate: asyncio.Event | None = None
    embedded: list[TokenInput] = field(default_factory=list)
    cuts: list[int | None] = field(default_factory=list)

    @property
    def facts(self) -> PoolingFacts:
        return replace(FACTS, kind=self.kind, dimensions=1 if self.kind == "reranker" else DIMENSIONS)

    async def read(
        self,
        inputs: Sequence[str | Sequence[int]],
        truncate: int | None,
        max_total: int,
        names: Sequence[str] = (),
    ) -> list[TokenInput]:
        self.cuts.append(truncate)
        read = [_ids(each, self.facts.vocab_size)[:truncate] for each in inputs]
        if sum(map(len, read)) > max_total:
            raise InvalidRequest(f"the inputs have more than {max_total:,} tokens together")
        return [TokenInput(ids) for ids in read]

    async def read_pairs(
        self, query: str, documents: Sequence[str], truncate: int | None, max_total: int
    ) -> list[TokenInput]:
        return await self.read([f"{query}{document}" for document in documents], truncate, max_total)

    async def embed(self, inputs: Sequence[TokenInput], start_within_s: float | None = None) -> list[Vector]:
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.embedded += inputs
        return [self.vector(each) for each in inputs]

    def vector(self, given: TokenInput) -> Vector:
        """How often each id modulo the dimensions occurs; of a reranker, how many tokens there are."""
        if self.kind == "reranker":
            return np.array([len(given) / 10], np.float32)
        places = np.array(given.ids, np.int64) % DIMENSIONS
        return np.bincount(places, minlength=DIMENSIONS).astype(np.float32)

    async def text_ids(self, text: str, with_special: bool) -> tuple[int, ...]:
        return (2, *_ids(text, 113), 3) if with_special else _ids(text, 113)


def _ids(given: str | Sequence[int], vocab_size: int) -> tuple[int, ...]:
    if isinstance(given, str):
        return tuple(ord(character) % vocab_size for character in given)
    if any(token_id >= vocab_size for token_id in given):
        raise InvalidRequest(f"an input has an id outside the vocabulary of {vocab_size}")
    return tuple(given)


def embedding_server(embedder: FakeEmbedder | None = None, **changes: Any) -> Server:
    embedder = embedder or FakeEmbedder()
    return create_server(
        NoChat(embedder, "tiny"),
        replace(MODEL_FACTS, drafter="none"),
        FakeTokenizer(),
        settings(**changes),
        now_s=lambda: 1700000000.0,
        started_s=1700000000.0,
        embedder=embedder,
    )


@cache
def shared_client() -> Client:
    """For requests that leave nothing behind: to build an application takes longer than to ask it."""
    return Client(embedding_server())
