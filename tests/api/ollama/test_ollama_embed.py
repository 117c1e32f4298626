"""Ollama's embeddings: refused for a model that generates text, else passed on to the embedding model."""

from __future__ import annotations

from typing import Any

import pytest
from fake_embedder import DIMENSIONS, FakeEmbedder
from shared_server import shared_server

EMBEDDER = FakeEmbedder()


def ask(path: str, body: dict[str, Any], status: int = 200) -> Any:
    client, _ = shared_server(embedder=EMBEDDER)
    EMBEDDER.cuts.clear()
    response = client.post(path, {"model": "tiny"} | body)
    assert response.status_code == status, response.text
    return response.json()


def test_embed() -> None:
    answer = ask("/api/embed", {"input": ["ab", "c"], "dimensions": 2, "truncate": False})
    assert answer.pop("total_duration") > 0
    assert [len(vector) for vector in answer.pop("embeddings")] == [2, 2]
    assert answer == {"model": "tiny", "load_duration": 0, "prompt_eval_count": 3}
    assert EMBEDDER.cuts == [None]


@pytest.mark.parametrize("given", ["ab", ["ab"]])
def test_one_text_is_a_list_of_one(given: Any) -> None:
    body = {"input": given, "dimensions": 0, "keep_alive": "5m"}
    (vector,) = ask("/api/embed", body)["embeddings"]
    assert len(vector) == DIMENSIONS
    assert sum(value * value for value in vector) == pytest.approx(1)
    assert EMBEDDER.cuts == [EMBEDDER.facts.max_tokens]


@pytest.mark.parametrize("given", ["", [], None])
def test_without_texts_the_model_is_loaded(given: Any) -> None:
    assert ask("/api/embed", {"input": given})["embeddings"] == []


def test_the_older_form() -> None:
    body = {"prompt": "abc", "options": {"num_ctx": 1}}
    assert len(ask("/api/embeddings", body)["embedding"]) == DIMENSIONS
    assert ask("/api/embeddings", {"prompt": ""}) == {"embedding": []}


@pytest.mark.parametrize(("path", "field"), [("/api/embed", "input"), ("/api/embeddings", "prompt")])
def test_a_model_that_generates_text_is_refused(path: str, field: str) -> None:
    response = shared_server()[0].post(path, {"model": "tiny:latest", field: "a"})
    assert response.status_code == 404
    assert "'tiny:latest' generates text and makes no embeddings" in response.json()["error"]


@pytest.mark.parametrize("given", [1, {"a": 1}, [1], [["a"]], ["a"] * 2049, True])
def test_other_inputs_are_refused(given: Any) -> None:
    assert "input" in ask("/api/embed", {"input": given}, status=400)["error"]
