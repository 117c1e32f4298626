"""POST /v1/embeddings with a scripted model: inputs, encodings, dimensions, limits, refusals, counts."""

from __future__ import annotations

import asyncio
import base64
import logging
from typing import Any

import numpy as np
import pytest
from asgi_caller import Caller
from fake_backend import USER, Client, FakeBackend, server
from fake_embedder import DIMENSIONS, FakeEmbedder, embedding_server, shared_client

from outrider.api.limits import EMBEDDING_INPUTS
from outrider.embed.engine import NotANumber
from outrider.embed.service import NotStarted
from outrider.engine.engine import EngineStopped
from outrider.pooling import TokenInput
from outrider.request import PromptTooLong

PATH = "/v1/embeddings"


def unit(*ids: int) -> np.ndarray:
    counts = np.bincount(np.array(ids) % DIMENSIONS, minlength=DIMENSIONS)
    return counts / np.linalg.norm(counts)


def error_of(response: Any) -> dict[str, Any]:
    return dict(response.json()["error"])


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("ab", [(97, 98)]),
        (["a", "bc"], [(97,), (98, 99)]),
        ([5, 6, 7.0], [(5, 6, 7)]),
        ([[5], [6, 7]], [(5,), (6, 7)]),
    ],
)
def test_every_form_of_input(given: Any, inputs: list[tuple[int, ...]]) -> None:
    embedder = FakeEmbedder()
    found = Client(embedding_server(embedder)).post(PATH, {"input": given, "model": "tiny"}).json()
    assert [each.ids for each in embedder.embedded] == inputs
    assert [item["index"] for item in found["data"]] == list(range(len(inputs)))
    for item, ids in zip(found["data"], inputs, strict=True):
        np.testing.assert_allclose(item["embedding"], unit(*ids), atol=1e-6)
    num_tokens = sum(map(len, inputs))
    assert found["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert (found["object"], found["model"]) == ("list", "tiny")


def test_base64_has_the_same_numbers_as_floats() -> None:
    client = shared_client()
    floats, coded = (
        client.post(PATH, {"input": "abc", "encoding_format": form}).json()["data"][0]["embedding"]
        for form in ("float", "base64")
    )
    assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == floats


def test_fewer_dimensions_have_length_one_again() -> None:
    body = {"input": [[8, 9, 9, 10]], "dimensions": 2}
    found = shared_client().post(PATH, body).json()["data"][0]["embedding"]
    np.testing.assert_allclose(found, [1 / 5**0.5, 2 / 5**0.5], atol=1e-6)


@pytest.mark.parametrize(("given", "cut"), [(None, None), (-1, 5000), (3, 3)])
def test_truncation_is_passed_on(given: int | None, cut: int | None) -> None:
    embedder = FakeEmbedder()
    body = {"input": "abcdef", "truncate_prompt_tokens": given}
    assert Client(embedding_server(embedder)).post(PATH, body).status_code == 200
    assert embedder.cuts == [cut]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": ["a", 5]}, "input[1]"),
        ({"input": [1, "a"]}, "input[1]"),
        ({"input": [1.5]}, "input[0]"),
        ({"input": [-1]}, "input[0]"),
        ({"input": ["a"] * (EMBEDDING_INPUTS.most + 1)}, "input"),
        ({"input": ["a"] * 100_000}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": DIMENSIONS + 1}, "dimensions"),
        ({"input": "a", "dimensions": "4"}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 5001}, "truncate_prompt_tokens"),
        ({"input": "a", "input_type": "query"}, "input_type"),
        ({"input": "a", "messages": USER}, "messages"),
    ],
)
def test_bad_requests_name_their_field(body: dict[str, Any], param: str) -> None:
    response = shared_client().post(PATH, body)
    assert response.status_code == 400
    assert error_of(response)["param"] == param


def test_an_object_is_no_input() -> None:
    response = shared_client().post(PATH, {"input": {"text": "a"}})
    assert response.status_code == 400
    assert error_of(response)["param"].startswith("input")


def test_dimensions_that_the_model_does_not_have_name_those_that_it_has() -> None:
    response = shared_client().post(PATH, {"input": "a", "dimensions": 99})
    assert "must be 1 to 8, as many as this model has" in error_of(response)["message"]


def test_too_many_tokens_together() -> None:
    response = shared_client().post(PATH, {"input": ["a" * 200] * 2000})
    assert response.status_code == 400
    assert "more than 300,000 tokens together" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (PromptTooLong("input[0] has 9 tokens", "9 tokens", 5), 400, "context_length_exceeded"),
        (EngineStopped("closed"), 503, None),
        (NotStarted(), 503, None),
        (NotANumber("NaN"), 500, None),
        (RuntimeError("boom"), 500, None),
    ],
)
def test_failures_have_their_status(failure: Exception, status: int, code: str | None) -> None:
    response = Client(embedding_server(FakeEmbedder(failure=failure))).post(PATH, {"input": "a"})
    assert response.status_code == status
    assert error_of(response)["code"] == code
    assert "boom" not in response.text


def test_a_request_that_takes_too_long_is_a_504() -> None:
    async def ask() -> int | None:
        caller = Caller(PATH, {"input": "a"})
        await caller.call(embedding_server(FakeEmbedder(gate=asyncio.Event()), request_timeout_s=0.05))
        return caller.status

    assert asyncio.run(ask()) == 504


def test_tokens_are_admitted_and_given_back() -> None:
    made = embedding_server(max_live_tokens=300)
    response = Client(made).post(PATH, {"input": ["a" * 200, "b" * 200]})
    assert response.status_code == 400
    assert "this request alone needs 400 prompt tokens" in error_of(response)["message"]
    assert Client(made).post(PATH, {"input": "a" * 200}).status_code == 200
    held = made.context.live.admission.held
    assert (held.num_requests, held.num_tokens, held.num_bytes) == (0, 0, 0)


def test_a_full_server_refuses() -> None:
    made = embedding_server(max_rows=1, max_queue=0)
    reservation = made.context.live.admission.open()
    assert Client(made).post(PATH, {"input": "a"}).status_code == 429
    reservation.release()
    assert Client(made).post(PATH, {"input": "a"}).status_code == 200


def test_a_client_that_leaves_gives_its_inputs_up() -> None:
    cancelled = []

    class Slow(FakeEmbedder):
        async def embed(self, inputs: Any, start_within_s: float | None = None) -> Any:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(list(inputs))
                raise

    async def leave() -> None:
        made = embedding_server(Slow())
        caller = Caller(PATH, {"input": "a"})
        calling = asyncio.create_task(caller.call(made))
        while not made.context.live.admission.held.num_tokens:
            await asyncio.sleep(0)
        caller.gone.set()
        await calling

    asyncio.run(leave())
    assert cancelled == [[TokenInput((97,))]]


def test_a_chat_model_refuses_by_name_with_a_status_that_clients_do_not_retry() -> None:
    for path, body in ((PATH, {"input": "a"}), ("/v1/rerank", {"query": "a", "documents": ["b"]})):
        response = Client(server(FakeBackend())).post(path, body)
        assert response.status_code == 404
        assert "'tiny' generates text and makes no embeddings" in error_of(response)["message"]
        assert error_of(response)["code"] == "not_supported"


def test_a_reranker_refuses_embeddings() -> None:
    response = Client(embedding_server(FakeEmbedder("reranker"))).post(PATH, {"input": "a"})
    assert response.status_code == 404
    assert "is a reranker and makes no embeddings: use /v1/rerank" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/chat/completions", {"messages": USER, "stream": True}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": USER, "max_tokens": 5}),
        ("/v1/messages/count_tokens", {"messages": USER}),
        ("/tokenize", {"messages": USER}),
    ],
)
def test_chat_routes_of_an_embedding_server_say_what_to_use(path: str, body: dict[str, Any]) -> None:
    response = shared_client().post(path, body)
    assert response.status_code == 404
    message = "'tiny' is an embedding model and generates no text: use /v1/embeddings and /v1/rerank"
    assert message in error_of(response)["message"]


def test_an_unknown_model_is_a_404() -> None:
    response = shared_client().post(PATH, {"input": "a", "model": "gpt"})
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


def test_requests_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outrider.access")
    client = Client(embedding_server())
    client.post(PATH, {"input": ["ab", "c"]})
    text = client.get("/metrics").text
    assert 'outrider_embedding_inputs_total{api="embeddings"} 2.0' in text
    assert 'outrider_requests_total{api="embeddings",finish="stop"} 1.0' in text
    assert 'outrider_tokens_total{kind="prompt"} 3.0' in text
    assert any("2 inputs, 3 tokens" in record.getMessage() for record in caplog.records)
    (fields,) = (record.fields for record in caplog.records if "inputs" in getattr(record, "fields", {}))
    assert (fields["api"], fields["model"], fields["inputs"]) == ("embeddings", "tiny", 2)
