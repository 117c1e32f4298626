"""POST /v1/rerank, also as /rerank and /v2/rerank: documents in the order of their relevance to a query.

Cohere's and Jina's request. A reranker (an encoder with a classification head) reads the query with each
document. With an embedding model the score is the cosine of the two embeddings; `meta.scoring` says which.
"""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from fastapi import APIRouter, Request, Response
from pydantic import Discriminator, Field, Tag
from starlette.responses import JSONResponse
from typing_extensions import TypedDict

from outrider.api.body import check_extra, json_router
from outrider.api.context import ServerContext
from outrider.api.embedding_backend import EmbeddingBackend
from outrider.api.embedding_calls import truncation, vectors_of
from outrider.api.errors import invalid
from outrider.api.keep_alive import KeepAlive
from outrider.api.limits import EMBEDDING_INPUTS, EMBEDDING_TOKENS, AtMost, Word
from outrider.api.openapi import answer
from outrider.api.request_fields import KEEP_ALIVE, RequestModel, Whole, documented
from outrider.embed.vectors import cosine, sigmoid
from outrider.pooling import PoolingFacts, TokenInput, Vector

SCORING = {"reranker": "cross-encoder", "embedding": "cosine similarity of embeddings"}
PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")
REFUSED = {
    "rank_fields": "not supported: send each document as one text",
    "max_chunks_per_doc": "not supported: a document is read as one text",
    "max_tokens_per_doc": "not supported: use truncate_prompt_tokens",
    "activation": "not supported: scores are from 0 to 1",
}

Text = Annotated[str, Field(min_length=1)]


class TextDocument(RequestModel):
    text: Text


def _document_kind(document: Any) -> str:
    return "object" if isinstance(document, (dict, TextDocument)) else "text"


Document = Annotated[
    Annotated[Text, Tag("text")] | Annotated[TextDocument, Tag("object")], Discriminator(_document_kind)
]


class RerankRequest(RequestModel):
    model: Word | None = None
    query: Text
    documents: Annotated[list[Document], AtMost(EMBEDDING_INPUTS)] = Field(min_length=1)
    top_n: Whole | None = documented("Most documents of the answer. Default: all", minimum=1)
    return_documents: bool | None = Field(None, description="Repeat the documents' texts. Default: false")
    truncate_prompt_tokens: Whole | None = documented(
        "Extension: cut documents so that an input has at most so many tokens; -1: the model's limit",
        anyOf=[{"const": -1}, {"type": "integer", "minimum": 1}, {"type": "null"}],
    )
    keep_alive: KeepAlive | None = Field(None, description=KEEP_ALIVE)
    user: Word | None = Field(None, description="No effect")


class RankedText(TypedDict):
    text: str


class RankedDocument(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[RankedText]


class RerankUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class RerankMeta(TypedDict):
    scoring: str


class RerankAnswer(TypedDict):
    id: str
    model: str
    results: list[RankedDocument]
    usage: RerankUsage
    meta: RerankMeta


class Rerank:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def create(self, body: RerankRequest, request: Request) -> Response:
        """The documents, most relevant first, each with its index in the request."""
        check_extra(body, REFUSED)
        if body.top_n is not None and body.top_n < 1:
            raise invalid("top_n", "must be at least 1")
        model = self._context.find_model(body.model, body.keep_alive)
        texts = [text if isinstance(text, str) else text.text for text in body.documents]

        async def read(backend: EmbeddingBackend) -> list[TokenInput]:
            cut = truncation(body.truncate_prompt_tokens, backend.facts.max_tokens)
            if backend.facts.kind == "reranker":
                return await backend.read_pairs(body.query, texts, cut, EMBEDDING_TOKENS.most)
            names = ["query", *(f"documents[{i}]" for i in range(len(texts)))]
            return await backend.read([body.query, *texts], cut, EMBEDDING_TOKENS.most, names)

        found = await vectors_of(self._context, "rerank", model, read, request.receive)
        results = _ranked(_scores(found.vectors, found.facts), body.top_n)
        if body.return_documents:
            results = [result | {"document": {"text": texts[result["index"]]}} for result in results]
        return JSONResponse(
            {
                "id": self._context.new_id("rerank-"),
                "model": model.name,
                "results": results,
                "usage": found.usage,
                "meta": {"scoring": SCORING[found.facts.kind]},
            }
        )


def _scores(vectors: list[Vector], facts: PoolingFacts) -> list[float]:
    if facts.kind == "reranker":
        return [sigmoid(float(vector[0])) for vector in vectors]
    query, *documents = vectors
    return [cosine(query, document) for document in documents]


def _ranked(scores: list[float], top_n: int | None) -> list[dict[str, Any]]:
    """The highest score first; equal scores in the order of the request."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    return [{"index": i, "relevance_score": scores[i]} for i in order[:top_n]]


def rerank_router(context: ServerContext) -> APIRouter:
    api = Rerank(context)
    summary = "Documents by their relevance to a query"
    return json_router(
        "rerank", *(("POST", path, api.create, summary, answer(RerankAnswer)) for path in PATHS)
    )
