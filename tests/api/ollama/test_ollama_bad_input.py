"""Fields of a wrong type or size are refused by name, in every route of Ollama's."""

from __future__ import annotations

from typing import Any

import pytest
from fake_backend import USER
from fake_embedder import FakeEmbedder
from shared_server import shared_server

EMBEDDER = FakeEmbedder()
BODIES: dict[str, dict[str, Any]] = {
    "/api/chat": {"model": "tiny", "messages": USER},
    "/api/generate": {"model": "tiny", "prompt": "Hi"},
    "/api/show": {"model": "tiny"},
    "/api/pull": {"model": "tiny"},
    "/api/embed": {"model": "tiny", "input": "a"},
    "/api/embeddings": {"model": "tiny", "prompt": "a"},
}
FLAG, TEXT, NUMBER = [1, "yes", [], {}], [1, True, ["a"], {}], ["1", True, [], {}]
ANSWER = {
    "model": TEXT,
    "stream": FLAG,
    "format": [1, True, ["json"], "yaml"],
    "options": [1, "x", [], True],
    "think": [1, "none", "LOW", [], {}],
    "thinking_token_budget": [*NUMBER, -2, 1.5],
    "max_thinking_tokens": [*NUMBER, 1.5],
    "keep_alive": [True, [], {}, "five minutes"],
    "logprobs": FLAG,
    "top_logprobs": [*NUMBER, -1, 21, 1.5],
    "truncate": FLAG,
    "shift": FLAG,
}
WRONG: dict[str, dict[str, list[Any]]] = {
    "/api/chat": ANSWER
    | {"messages": [1, "x", {}, [1], ["x"], [{}]], "tools": [1, "x", {}, [1], [{"type": 1}]]},
    "/api/generate": ANSWER
    | {
        "prompt": TEXT,
        "system": TEXT,
        "suffix": TEXT,
        "template": TEXT,
        "raw": FLAG,
        "images": [1, "aGk=", [1], [None], {}],
        "context": ["x", [None], ["1"], [1.5], {}],
    },
    "/api/show": {"model": TEXT, "name": TEXT, "verbose": FLAG},
    "/api/pull": {"model": TEXT, "name": TEXT, "stream": FLAG},
    "/api/embed": {"model": TEXT, "truncate": FLAG, "dimensions": [*NUMBER, -1, 1.5], "keep_alive": [[], {}]},
    "/api/embeddings": {"model": TEXT, "prompt": TEXT, "options": [1, []]},
}
OPTIONS: dict[str, list[Any]] = {
    **{name: [*NUMBER, -0.5, 1e300] for name in ("temperature", "top_p", "min_p", "repeat_penalty")},
    **{name: [*NUMBER, -2.5, 2.5] for name in ("presence_penalty", "frequency_penalty")},
    **{name: [*NUMBER, 1.5] for name in ("top_k", "num_ctx", "num_gpu", "num_thread", "repeat_last_n")},
    "num_predict": [*NUMBER, 0, 1.5],
    "seed": [*NUMBER, 0.5, 2**64, -(2**63) - 1],
    "stop": ["x", [1], [""], {}, ["x"] * 65, ["x" * 4097]],
    "typical_p": [*NUMBER, 0.5],
    "mirostat": [*NUMBER, 1, 2],
    "use_mmap": FLAG,
}
MESSAGES: dict[str, list[Any]] = {
    "role": [None, 1, "", "developer", "function", []],
    "content": [1, True, [{"type": "text", "text": "Hi"}], {}],
    "thinking": TEXT,
    "images": [1, "aGk=", [1], [None]],
    "tool_calls": [
        1,
        {},
        [1],
        [{}],
        [{"function": {"name": "f", "arguments": "{}"}}],
        [{"function": {"name": 1}}],
    ],
    "tool_name": [*TEXT, "x" * 1025],
    "tool_call_id": TEXT,
}


def error_of(path: str, body: dict[str, Any]) -> str:
    client, backend = shared_server(embedder=EMBEDDER)
    response = client.post(path, BODIES[path] | body)
    assert response.status_code == 400, (body, response.text)
    assert len(response.content) < 2000
    assert not backend.streams
    error = response.json()["error"]
    assert isinstance(error, str)
    return error


@pytest.mark.parametrize(
    ("path", "field"), [(path, field) for path, fields in WRONG.items() for field in fields]
)
def test_a_field_of_a_wrong_type_is_named(path: str, field: str) -> None:
    for value in WRONG[path][field]:
        assert field in error_of(path, {field: value})


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_a_wrong_type_is_named(option: str) -> None:
    for value in OPTIONS[option]:
        assert option in error_of("/api/generate", {"options": {option: value}})


@pytest.mark.parametrize("field", MESSAGES)
def test_a_field_of_a_message_of_a_wrong_type_is_named(field: str) -> None:
    for value in MESSAGES[field]:
        error = error_of("/api/chat", {"messages": [{"role": "user", "content": "Hi"} | {field: value}]})
        assert f"messages[0].{field}" in error


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": USER * 10_001}, "messages"),
        ({"tools": [{"function": {"name": "f"}}] * 1025}, "tools"),
        ({"tools": [{"function": {"name": "f" * 257}}]}, "tools[0].function.name"),
        ({"model": "x" * 1025}, "model"),
        ({"format": {"enum": ["x"] * 20_001}}, "format"),
        ({"format": {"enum": ["x" * (1 << 20)]}}, "format"),
        ({"x": [0] * 300_001}, "the limit is 300,000"),
        ({"x": 10**64}, "digits"),
    ],
)
def test_sizes_are_limited(body: dict[str, Any], words: str) -> None:
    assert words in error_of("/api/chat", body)
