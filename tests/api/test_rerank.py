"""POST /v1/rerank with a scripted model: order, scores, documents, limits."""

from __future__ import annotations

from typing import Any

import pytest
from fake_backend import Client
from fake_embedder import FakeEmbedder, embedding_server, shared_client

from outrider.api.limits import EMBEDDING_INPUTS

BODY = {"query": "ab", "documents": ["xyz", {"text": "ab"}, "abz"]}


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_by_the_cosine_of_embeddings(path: str) -> None:
    found = shared_client().post(path, BODY).json()
    assert [result["index"] for result in found["results"]] == [1, 2, 0]
    assert found["results"][0]["relevance_score"] == pytest.approx(1, abs=1e-6)
    assert found["meta"] == {"scoring": "cosine similarity of embeddings"}
    assert found["usage"] == {"prompt_tokens": 10, "total_tokens": 10}
    assert found["id"].startswith("rerank-")
    assert all("document" not in result for result in found["results"])


def test_a_reranker_reads_pairs_and_scores_from_0_to_1() -> None:
    embedder = FakeEmbedder("reranker")
    found = Client(embedding_server(embedder)).post("/v1/rerank", BODY).json()
    assert [result["index"] for result in found["results"]] == [0, 2, 1]
    assert [len(each) for each in embedder.embedded] == [5, 4, 5]
    assert found["results"][0]["relevance_score"] == pytest.approx(1 / (1 + 2.718281828**-0.5))
    assert found["meta"] == {"scoring": "cross-encoder"}


def test_the_best_documents_with_their_texts() -> None:
    body = BODY | {"top_n": 2, "return_documents": True}
    found = shared_client().post("/v1/rerank", body).json()
    assert [result["document"] for result in found["results"]] == [{"text": "ab"}, {"text": "abz"}]


def test_more_than_all_are_all() -> None:
    assert len(shared_client().post("/rerank", BODY | {"top_n": 99}).json()["results"]) == 3


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"query": ""}, "query"),
        ({"query": None}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": ["a", ""]}, "documents[1]"),
        ({"documents": [{"text": ""}]}, "documents[0].text"),
        ({"documents": [{"title": "a"}]}, "documents[0].text"),
        ({"documents": [5]}, "documents[0]"),
        ({"documents": ["a"] * (EMBEDDING_INPUTS.most + 1)}, "documents"),
        ({"top_n": 0}, "top_n"),
        ({"rank_fields": ["title"]}, "rank_fields"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_bad_requests_name_their_field(changes: dict[str, Any], param: str) -> None:
    response = shared_client().post("/v1/rerank", BODY | changes)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
