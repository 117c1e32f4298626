"""A server with a chat model and an encoder: each request gets the model that it names, also at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from server_process import ServerProcess, serving, write_tiny_model
from tiny_encoders import HIDDEN, words, write_encoder

CHAT = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 48, "temperature": 0}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models")
    write_encoder(folder / "encoder")
    write_tiny_model(folder / "chat", with_head=False)
    with serving(folder / "chat", "--models-dir", str(folder)) as server:
        yield server


def test_a_request_gets_the_model_that_it_names(both: ServerProcess) -> None:
    found = both.post("/v1/embeddings", {"model": "encoder", "input": words(1, 2)})
    assert len(found.json()["data"][0]["embedding"]) == HIDDEN
    assert both.post("/v1/chat/completions", CHAT).json()["usage"]["completion_tokens"] > 0
    tokens = both.post("/tokenize", {"model": "encoder", "prompt": words(0)}).json()["tokens"]
    assert tokens == [2, 4, 3]


def test_the_wrong_model_is_refused_by_name(both: ServerProcess) -> None:
    embedding = both.post("/v1/embeddings", {"model": "chat", "input": "a"})
    assert embedding.status_code == 404
    assert "'chat' generates text and makes no embeddings" in embedding.json()["error"]["message"]
    chat = both.post("/v1/chat/completions", CHAT | {"model": "encoder"})
    assert chat.status_code == 404
    assert "'encoder' is an embedding model and generates no text" in chat.json()["error"]["message"]


def test_answers_and_embeddings_do_not_change_beside_each_other(both: ServerProcess) -> None:
    texts = [words(*range(n)) for n in range(1, 30)]
    body = {"model": "encoder", "input": texts}
    alone = both.post("/v1/embeddings", body).json(), both.post("/v1/chat/completions", CHAT).json()
    with ThreadPoolExecutor(8) as threads:
        embeddings = [threads.submit(both.post, "/v1/embeddings", body) for _ in range(4)]
        answers = [threads.submit(both.post, "/v1/chat/completions", CHAT) for _ in range(4)]
    for found in embeddings:
        assert found.result().json()["data"] == alone[0]["data"]
    for found in answers:
        assert found.result().json()["choices"] == alone[1]["choices"]


def test_an_encoder_is_unloaded_and_loaded_again(both: ServerProcess) -> None:
    body = {"model": "encoder", "input": words(1)}
    before = both.post("/v1/embeddings", body).json()["data"]
    assert both.post("/v1/models/encoder/unload", {}).status_code == 200
    states = {model["id"]: model["state"] for model in both.get("/v1/models")["data"]}
    assert states["encoder"] != "loaded"
    assert both.post("/v1/embeddings", body).json()["data"] == before
