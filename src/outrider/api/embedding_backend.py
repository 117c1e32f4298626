"""What the routes of embeddings and rerank need of a pooling model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.pooling import PoolingFacts, TokenInput, Vector


class EmbeddingBackend(Protocol):
    """A pooling model, as the routes use it. Implemented in embed/service.py."""

    @property
    def facts(self) -> PoolingFacts: ...

    async def read(
        self,
        inputs: Sequence[str | Sequence[int]],
        truncate: int | None,
        max_total: int,
        names: Sequence[str] = (),
    ) -> list[TokenInput]: ...

    async def read_pairs(
        self, query: str, documents: Sequence[str], truncate: int | None, max_total: int
    ) -> list[TokenInput]: ...

    async def embed(
        self, inputs: Sequence[TokenInput], start_within_s: float | None = None
    ) -> list[Vector]: ...
