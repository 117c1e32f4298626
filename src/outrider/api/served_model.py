"""How a route gets the model that a request names.

    model = context.find_model(body.model, body.keep_alive, body.adapter)  # 404 if unknown; nothing is loaded
    chat = chat_request(body, *model.defaults)                 # a bad request is refused before a load
    answers = await context.live.start(api, model, n, lambda served: [...], request.receive)

`live.start` loads the model if it has to, holds it as long as the answers run, and calls the function with
the ServedModel to get the prompts. If the request names an adapter (`adapter`, or base:adapter), its
backend adds the adapter to them. A route without answers holds the model itself:

    async with model.use() as served:
        await served.backend.count_tokens(chat)

`answers.served` and `served` have what depends on the model: backend, facts, tokens, sampling defaults.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from outrider.api.adapter_control import AdapterBackend, AdapterControl
from outrider.api.chat_backend import ChatBackend
from outrider.api.embedding_backend import EmbeddingBackend
from outrider.api.errors import ApiError
from outrider.api.logprobs import TokenText
from outrider.api.model_card import NO_CARD, ModelCard
from outrider.api.operations.memory import MemoryReport
from outrider.api.operations.prefix_cache import PrefixControl
from outrider.chat.conversation import ChatRequest
from outrider.engine.validation import ModelFacts
from outrider.pool.model_entry import ModelEntry
from outrider.pool.model_pool import Lease, ModelPool
from outrider.pooling import PoolingKind
from outrider.request import NO_DEFAULTS, SamplingDefaults


class RequestDefaults(NamedTuple):
    """Values for requests that leave them out."""

    max_tokens: int | None = None  # None: up to the model's context
    sampling: SamplingDefaults = NO_DEFAULTS


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A loaded model, as the routes use it."""

    backend: ChatBackend
    facts: ModelFacts
    tokens: TokenText
    defaults: RequestDefaults
    max_rows: int = 16  # sequences that its engine decodes at once
    cache_budget_bytes: int | None = None  # most bytes of its row caches; None: not known
    prefix_cache: PrefixControl | None = None
    memory: MemoryReport | None = None
    embedder: EmbeddingBackend | None = None  # None: the model generates text
    card: ModelCard = NO_CARD
    adapters: AdapterControl | None = None  # None: the model takes none
    on_close: Callable[[], None] = lambda: None

    def close(self) -> None:
        self.on_close()

    def embedder_named(self, name: str) -> EmbeddingBackend:
        """The pooling model. Raises a 404 for a model that generates text. `name`: as the request has it."""
        if self.embedder is not None:
            return self.embedder
        raise ApiError(  # not a 501: the SDKs would repeat the request
            404,
            f"the model {name[:200]!r} generates text and makes no embeddings: it has no pooling files "
            "(modules.json of sentence-transformers). Serve an embedding model beside it, such as "
            "all-minilm-l6-v2, and name that one.",
            param="model",
            code="not_supported",
        )


@dataclass(frozen=True)
class ExpectedModel:
    """What the settings and files of a model tell before it is loaded."""

    defaults: RequestDefaults
    max_context: int | None = None  # None: not known
    reads_images: bool = False
    card: ModelCard = NO_CARD
    facts: ModelFacts | None = None  # of a model that was loaded before
    adapters: tuple[str, ...] | None = None  # names that it is loaded with; None: it takes no adapters
    kind: PoolingKind | None = None  # None: it generates text, as far as its files tell


Entry = ModelEntry[ServedModel]
Models = ModelPool[ServedModel]


@dataclass(frozen=True)
class RequestedModel:
    """The model that a request names, loaded or not."""

    name: str  # that the answer carries
    entry: Entry
    defaults: RequestDefaults  # of the loaded model; before its load, as far as they are known
    _models: Models
    keep_alive_s: float | None = None  # how long it stays loaded after its last use; None: as before
    adapter: str | None = None  # that the answers are computed with

    async def lease(self) -> Lease[ServedModel]:
        """Load the model if needed. It stays loaded until the lease is released.

        Raises a 404 if the request names an adapter, and the model takes none.
        """
        lease = await self._models.lease(self.entry, self.keep_alive_s)
        if self.adapter is not None and lease.model.adapters is None:
            lease.release()
            raise ApiError(
                404,
                f"there is no adapter {self.adapter[:64]!r}: the model {self.entry.name!r} is served without "
                "adapters (--adapters, --adapters-dir)",
                param="adapter",
                code="adapter_not_found",
            )
        return lease

    def with_adapter(self, served: ServedModel) -> ServedModel:
        """The loaded model, with the request's adapter for all answers."""
        if self.adapter is None:
            return served
        return replace(served, backend=AdapterBackend(served.backend, self.adapter))

    async def count_tokens(self, request: ChatRequest) -> int:
        async with self.use() as served:
            return await served.backend.count_tokens(request)

    @asynccontextmanager
    async def use(self) -> AsyncIterator[ServedModel]:
        with await self.lease() as served:
            yield served
