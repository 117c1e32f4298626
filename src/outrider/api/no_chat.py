"""The chat backend of a server whose model generates no text: an embedding model or a reranker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Never, Protocol

from outrider.api.chat_backend import PreparedAnswers
from outrider.api.errors import ApiError
from outrider.chat.conversation import ChatRequest
from outrider.pooling import PoolingFacts
from outrider.request import SamplingParams

ROUTES = {"embedding": "/v1/embeddings and /v1/rerank", "reranker": "/v1/rerank"}
WORDS = {"embedding": "an embedding model", "reranker": "a reranker"}


class TextIds(Protocol):
    @property
    def facts(self) -> PoolingFacts: ...

    async def text_ids(self, text: str, with_special: bool) -> tuple[int, ...]: ...


class NoChat:
    """Refuses every conversation and prompt with a 404. Texts can be tokenized."""

    def __init__(self, embedder: TextIds, model: str) -> None:
        self._embedder = embedder
        self._model = model

    async def prepare(self, request: ChatRequest, num_answers: int = 1) -> PreparedAnswers:
        self._refuse()

    async def prepare_text(
        self, prompt: str | Sequence[int], params: SamplingParams, num_answers: int = 1
    ) -> PreparedAnswers:
        self._refuse()

    async def count_tokens(self, request: ChatRequest) -> int:
        self._refuse()

    async def prompt_ids(self, prompt: ChatRequest | str, add_special_tokens: bool) -> Sequence[int]:
        if not isinstance(prompt, str):
            self._refuse()
        return await self._embedder.text_ids(prompt, add_special_tokens)

    def _refuse(self) -> Never:
        kind = self._embedder.facts.kind
        raise ApiError(
            404,
            f"the model {self._model!r} is {WORDS[kind]} and generates no text: use {ROUTES[kind]}, or a "
            "server with a chat model",
            param="model",
            code="not_supported",
        )
