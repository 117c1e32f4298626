"""POST /v1/embeddings: OpenAI's embeddings of texts and token ids, as numbers or in base64."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Discriminator, Field, Tag, WrapValidator

from outrider.api.body import check_extra, json_router
from outrider.api.context import ServerContext
from outrider.api.embedding_backend import EmbeddingBackend
from outrider.api.embedding_calls import Vectors, truncation, vectors_of
from outrider.api.errors import ApiError, invalid
from outrider.api.keep_alive import KeepAlive
from outrider.api.limits import EMBEDDING_INPUTS, EMBEDDING_TOKENS, JSON_VALUES, AtMost, Word
from outrider.api.openai.answer_models import EmbeddingList
from outrider.api.openai.completions import prompt_kind, whole_ids
from outrider.api.openapi import answer
from outrider.api.request_fields import KEEP_ALIVE, RequestModel, Whole, documented
from outrider.embed.vectors import as_base64, embedding
from outrider.pooling import PoolingFacts, TokenInput

REFUSED = {
    "messages": "not supported: send the text as input",
    "add_special_tokens": "not supported: texts get the model's special tokens, token ids get none",
    "normalize": "not supported: the model's own files say whether its embeddings are normalised",
    "embed_dtype": "not supported: use encoding_format",
    "input_type": "not supported: write the model's prompt for queries or documents into the input",
    "task": "not supported: write the model's prompt for the task into the input",
}

InputText = Annotated[str, Field(min_length=1)]
InputIds = Annotated[
    list[Annotated[int, Field(ge=0)]], AtMost(JSON_VALUES), Field(min_length=1), WrapValidator(whole_ids)
]
EmbeddingInput = Annotated[
    Annotated[InputText, Tag("text")]
    | Annotated[list[InputText], AtMost(EMBEDDING_INPUTS), Tag("texts"), Field(min_length=1)]
    | Annotated[InputIds, Tag("ids")]
    | Annotated[list[InputIds], AtMost(EMBEDDING_INPUTS), Tag("lists of ids"), Field(min_length=1)],
    Discriminator(prompt_kind),
]


class EmbeddingRequest(RequestModel):
    model: Word | None = None
    input: EmbeddingInput = Field(description="A text, token ids, or a list of either")
    encoding_format: Literal["float", "base64"] | None = Field(None, description="Default: float")
    dimensions: Whole | None = documented(
        "The first values of each embedding, normalised again; at most as many as the model has", minimum=1
    )
    truncate_prompt_tokens: Whole | None = documented(
        "Extension: cut inputs to so many tokens; -1: to the model's limit. Without it, a long input is an "
        "error",
        anyOf=[{"const": -1}, {"type": "integer", "minimum": 1}, {"type": "null"}],
    )
    keep_alive: KeepAlive | None = Field(None, description=KEEP_ALIVE)
    user: Word | None = Field(None, description="No effect")


class Embeddings:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def create(self, body: EmbeddingRequest, request: Request) -> Response:
        """One vector for each input, in the order of the inputs."""
        check_extra(body, REFUSED)
        model, inputs = self._context.find_model(body.model, body.keep_alive), _inputs(body.input)

        async def read(backend: EmbeddingBackend) -> list[TokenInput]:
            check_embeds(model.name, backend.facts)
            check_dimensions(body.dimensions, backend.facts)
            cut = truncation(body.truncate_prompt_tokens, backend.facts.max_tokens)
            return await backend.read(inputs, cut, EMBEDDING_TOKENS.most)

        found = await vectors_of(self._context, "embeddings", model, read, request.receive)
        content = await asyncio.to_thread(_rendered, body, model.name, found)
        return Response(content, media_type="application/json")


def _inputs(given: str | Sequence[Any]) -> list[str | list[int]]:
    is_single = isinstance(given, str) or isinstance(given[0], int)
    inputs: Any = [given] if is_single else list(given)
    return list(inputs)


def check_embeds(model: str, facts: PoolingFacts) -> None:
    if facts.kind == "reranker":
        raise ApiError(
            404,
            f"the model {model[:200]!r} is a reranker and makes no embeddings: use /v1/rerank",
            param="model",
            code="not_supported",
        )


def check_dimensions(given: int | None, facts: PoolingFacts) -> None:
    if given is not None and not 1 <= given <= facts.dimensions:
        raise invalid("dimensions", f"must be 1 to {facts.dimensions}, as many as this model has")


def _rendered(body: EmbeddingRequest, model: str, found: Vectors) -> bytes:
    """The answer as JSON. Vector by vector: one large json.dumps would hold up all other threads."""
    items = []
    for index, vector in enumerate(found.vectors):
        values = embedding(vector, found.facts, body.dimensions)
        written = as_base64(values) if body.encoding_format == "base64" else values.tolist()
        items.append(json.dumps({"object": "embedding", "index": index, "embedding": written}))
    rest = json.dumps({"model": model, "usage": found.usage})
    return f'{{"object": "list", "data": [{", ".join(items)}], {rest[1:]}'.encode()


def embeddings_router(context: ServerContext) -> APIRouter:
    api = Embeddings(context)
    return json_router(
        "OpenAI", ("POST", "/v1/embeddings", api.create, "Embeddings of texts", answer(EmbeddingList))
    )
