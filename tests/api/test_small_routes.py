"""/tokenize, /detokenize, and the routes that are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from fake_backend import USER, Client, FakeBackend, server
from fake_embedder import shared_client

from outrider.api.unserved import UNSERVED

CHAT = Client(server(FakeBackend()))


def post(path: str, body: Any) -> Any:
    return CHAT.post(path, body)


def test_a_prompt_as_tokens() -> None:
    found = post("/tokenize", {"prompt": "ab"}).json()
    assert found == {"count": 3, "max_model_len": 256, "tokens": [0, 97, 98], "token_strs": None}
    assert post("/tokenize", {"prompt": "ab", "add_special_tokens": False}).json()["tokens"] == [97, 98]
    assert post("/tokenize", {"prompt": ""}).json()["tokens"] == [0]


def test_tokens_as_the_vocabulary_writes_them() -> None:
    body = {"prompt": "ab", "return_token_strs": True, "add_special_tokens": False}
    assert post("/tokenize", body).json()["token_strs"] == [chr(97 + 97), chr(97 + 98)]


def test_a_conversation_as_tokens() -> None:
    backend = FakeBackend()
    tools = [{"type": "function", "function": {"name": "look"}}]
    body = {
        "messages": USER,
        "tools": tools,
        "chat_template_kwargs": {"a": 1},
        "add_generation_prompt": False,
    }
    assert Client(server(backend)).post("/tokenize", body).json()["tokens"] == [72, 105]
    (request,) = backend.requests
    assert [tool.name for tool in request.tools] == ["look"]
    assert request.template_kwargs == {"a": 1, "add_generation_prompt": False}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "messages": USER}, "prompt"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": []}, "messages"),
        ({"messages": USER, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": USER, "chat_template": "x"}, "chat_template"),
    ],
)
def test_bad_requests_to_tokenize_name_their_field(body: dict[str, Any], param: str) -> None:
    response = post("/tokenize", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_tokens_as_text() -> None:
    assert post("/detokenize", {"tokens": [0, 1, 2]}).json() == {"prompt": "abc"}
    assert post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize("tokens", [None, "a", [113], [-1], ["a"], [1.5], [[1]]])
def test_bad_tokens_are_refused(tokens: Any) -> None:
    response = post("/detokenize", {"tokens": tokens})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("tokens")


def test_an_embedding_server_tokenizes_texts() -> None:
    client = shared_client()
    assert client.post("/tokenize", {"prompt": "a"}).json()["tokens"] == [2, 97, 3]
    assert client.post("/detokenize", {"tokens": [0]}).json() == {"prompt": "a"}


@pytest.mark.parametrize("path", UNSERVED)
def test_routes_of_other_servers_are_refused_with_what_to_use(path: str) -> None:
    for method, url in (("POST", path), ("GET", f"{path}/abc"), ("POST", f"{path}/generations")):
        response = CHAT.request(method, url)
        assert response.status_code == 404
        error = response.json()["error"]
        assert error["code"] == "not_supported"
        assert error["message"].startswith(f"{path} is not served: ")


def test_refused_routes_need_a_key_too() -> None:
    client = Client(server(FakeBackend(), api_key="k"))
    assert client.post("/v1/moderations", {"input": "a"}).status_code == 401
