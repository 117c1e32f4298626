"""What Open WebUI sends in a first session (tests/data/open_webui.json) to a server with several models.

With scripted models, so that answers with thoughts and calls can be asked for. `test_ollama_end_to_end.py`
beside it plays a chat with a real one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_backend import CALLS, FACTS, HELLO, Client, FakeBackend, FakeTokenizer, settings
from fake_embedder import DIMENSIONS, FakeEmbedder

from outrider.api.app import create_pool_server
from outrider.api.logprobs import TokenText
from outrider.api.no_chat import NoChat
from outrider.api.served_model import RequestDefaults, ServedModel
from outrider.chat.conversation import ChatRequest
from outrider.chat.events import ChatEvent
from outrider.pool.model_entry import ModelEntry, NoSource
from outrider.pool.model_pool import ModelPool

FIXTURE = json.loads((Path(__file__).parents[2] / "data" / "open_webui.json").read_text())
STEPS = {step["what"]: step for step in FIXTURE["requests"]}
UNLOAD = "unload"


def answer(request: ChatRequest) -> Sequence[ChatEvent]:
    return CALLS if request.tools and request.messages[-1].role == "user" else HELLO


def entry(name: str, model: ServedModel) -> ModelEntry[ServedModel]:
    made: ModelEntry[ServedModel] = ModelEntry(name, NoSource())
    made.model, made.state = model, "loaded"
    return made


def embedder(name: str, fake: FakeEmbedder) -> ServedModel:
    tokens = TokenText(FakeTokenizer())
    return ServedModel(NoChat(fake, name), FACTS, tokens, RequestDefaults(), embedder=fake)


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return FakeBackend(answer=answer)


@pytest.fixture(scope="module")
def client(backend: FakeBackend) -> Client:
    return client_of(backend)


def client_of(backend: FakeBackend) -> Client:
    facts = replace(FACTS, max_context=8192, reads_images=True)
    models = {
        "chat": ServedModel(backend, facts, TokenText(FakeTokenizer()), RequestDefaults()),
        "embedder": embedder("embedder", FakeEmbedder()),
        "reranker": embedder("reranker", FakeEmbedder("reranker")),
    }
    pool = ModelPool([entry(name, model) for name, model in models.items()])
    return Client(create_pool_server(pool, settings()), **FIXTURE["headers"])


def send(client: Client, what: str) -> httpx.Response:
    """As Open WebUI sends it: the body is JSON in bytes."""
    step = STEPS[what]
    content = json.dumps(step["body"]).encode() if "body" in step else None
    return client.request(step["method"], step["path"], content=content)


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


@pytest.mark.parametrize("what", [what for what in STEPS if what != UNLOAD])
def test_every_request_is_answered(client: Client, what: str) -> None:
    response = send(client, what)
    assert response.status_code == 200, response.text


def test_models_are_found_by_the_names_of_the_list(client: Client) -> None:
    """The list is merged with that of the loaded models, by name."""
    listed = send(client, "list").json()["models"]
    assert [one["model"] for one in listed] == ["chat:latest", "embedder:latest", "reranker:latest"]
    assert all(one["name"] == one["model"] and {"details", "size", "digest"} <= {*one} for one in listed)
    loaded = send(client, "loaded").json()["models"]
    expires = {one["name"]: datetime.fromisoformat(one["expires_at"]).timestamp() for one in loaded}
    assert {*expires} == {one["name"] for one in listed}
    ids = [one["id"] for one in send(client, "openai list").json()["data"]]
    assert ids == ["chat", "embedder", "reranker"]


def test_options_reach_the_model(client: Client, backend: FakeBackend) -> None:
    *parts, last = lines(send(client, "chat"))
    assert "".join(part["message"]["content"] for part in parts) == "Hello wörld"
    assert {"total_duration", "prompt_eval_count", "eval_count"} <= {*last}
    params = backend.requests[-1].params
    sampling = params.temperature, params.top_p, params.top_k, params.min_p, params.seed, params.max_tokens
    assert sampling == (0.6, 0.9, 40, 0.05, 3, 128)
    assert (params.repetition_penalty, params.stop_strings) == (1.1, ("###",))


def test_tools_and_their_results_reach_the_model(client: Client, backend: FakeBackend) -> None:
    send(client, "tools")
    asked, called, result = backend.requests[-1].messages
    assert (asked.role, called.role, result.role) == ("user", "assistant", "tool")
    assert [(call.name, json.loads(call.arguments)) for call in called.tool_calls] == [
        ("get_weather", {"city": "Oslo"})
    ]
    assert (result.text, result.tool_call_id) == ("rain", "call_1")
    assert [tool.name for tool in backend.requests[-1].tools] == ["get_weather"]
    chunks = send(client, "openai chat").text.split("\n\n")
    assert chunks[-2] == "data: [DONE]"
    deltas = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks[:-2] if chunk.startswith("data: ")]
    assert any(choice["delta"].get("tool_calls") for delta in deltas for choice in delta["choices"])
    assert deltas[-1]["usage"]["total_tokens"] > 0


def test_chunks_of_documents_are_embedded_and_ranked(client: Client) -> None:
    ollama = send(client, "embed").json()["embeddings"]
    openai = [one["embedding"] for one in send(client, "openai embed").json()["data"]]
    assert ollama == openai
    assert [len(vector) for vector in ollama] == [DIMENSIONS] * 2
    ranked = send(client, "rerank").json()["results"]
    assert sorted(one["index"] for one in ranked) == [0, 1]
    assert all(0 <= one["relevance_score"] <= 1 for one in ranked)


def test_a_model_is_unloaded() -> None:
    client = client_of(FakeBackend())
    assert send(client, UNLOAD).json()["done_reason"] == "unload"
    assert "chat:latest" not in [one["name"] for one in send(client, "loaded").json()["models"]]
