"""POST /api/embed, and /api/embeddings, its older form for one text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Field
from starlette.responses import JSONResponse

from outrider.api.body import check_extra, json_router
from outrider.api.context import ServerContext
from outrider.api.embedding_backend import EmbeddingBackend
from outrider.api.embedding_calls import vectors_of
from outrider.api.keep_alive import KeepAlive
from outrider.api.limits import EMBEDDING_INPUTS, EMBEDDING_TOKENS, AtMost
from outrider.api.ollama import served_models
from outrider.api.ollama.answer_lines import nanoseconds
from outrider.api.ollama.answer_models import OllamaEmbedding, OllamaEmbeddings
from outrider.api.ollama.chat_request import ModelName
from outrider.api.ollama.options import Options
from outrider.api.ollama.route import OllamaRoute
from outrider.api.openai.embeddings import check_dimensions, check_embeds
from outrider.api.openapi import answer
from outrider.api.request_fields import RequestModel, whole
from outrider.embed.vectors import embedding
from outrider.pooling import TokenInput

Texts = str | Annotated[list[str], AtMost(EMBEDDING_INPUTS)]
NumDimensions = Annotated[int, Field(ge=0), BeforeValidator(whole)]


class EmbeddingFields(RequestModel):
    model: ModelName
    options: Options | None = Field(None, description="No effect")
    keep_alive: KeepAlive | None = Field(None, description="How long the model stays loaded")


class EmbedRequest(EmbeddingFields):
    input: Texts | None = None
    truncate: bool | None = Field(None, description="Cut texts that are too long. Default: true")
    dimensions: NumDimensions | None = Field(None, description="0: all")


class EmbeddingsRequest(EmbeddingFields):
    prompt: str | None = None


class OllamaEmbed:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def embed(self, body: EmbedRequest, request: Request) -> Response:
        """A vector for each text."""
        started_s = time.perf_counter()
        texts = body.input or []
        if isinstance(texts, str):
            texts = [texts]
        truncate = body.truncate is not False
        vectors, num_tokens = await self._embed(body, texts, request, truncate, body.dimensions or None)
        answered: dict[str, Any] = {
            "model": body.model,
            "embeddings": vectors,
            "total_duration": nanoseconds(time.perf_counter() - started_s),
            "load_duration": 0,
            "prompt_eval_count": num_tokens,
        }
        return JSONResponse(answered)

    async def embeddings(self, body: EmbeddingsRequest, request: Request) -> Response:
        """The vector of one text."""
        vectors, _ = await self._embed(body, [body.prompt] if body.prompt else [], request)
        return JSONResponse({"embedding": vectors[0] if vectors else []})

    async def _embed(
        self,
        body: EmbeddingFields,
        texts: Sequence[str],
        request: Request,
        truncate: bool = True,
        dimensions: int | None = None,
    ) -> tuple[list[list[float]], int]:
        """The vectors, and the tokens of all texts."""
        check_extra(body, {})
        model = served_models.find(self._context, body.model, body.keep_alive)
        if not texts:
            await served_models.load_or_unload(self._context, model, request.receive)
            return [], 0

        async def read(backend: EmbeddingBackend) -> list[TokenInput]:
            check_embeds(model.name, backend.facts)
            check_dimensions(dimensions, backend.facts)
            cut = backend.facts.max_tokens if truncate else None
            return await backend.read(texts, cut, EMBEDDING_TOKENS.most)

        found = await vectors_of(self._context, "ollama_embed", model, read, request.receive)
        vectors = [embedding(vector, found.facts, dimensions).tolist() for vector in found.vectors]
        return vectors, found.num_tokens


def ollama_embed_router(context: ServerContext) -> APIRouter:
    api = OllamaEmbed(context)
    return json_router(
        "Ollama",
        ("POST", "/api/embed", api.embed, "Embeddings", answer(OllamaEmbeddings)),
        ("POST", "/api/embeddings", api.embeddings, "Embedding of one text", answer(OllamaEmbedding)),
        route_class=OllamaRoute,
    )
