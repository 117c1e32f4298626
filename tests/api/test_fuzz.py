"""Whatever is sent, the answer is never a 500: valid requests with parts replaced by arbitrary JSON."""

from __future__ import annotations

import copy
import json
from typing import Any

import httpx
import pytest
from fake_backend import CALLS, Client, FakeBackend, server
from fake_embedder import FakeEmbedder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patience import in_test_or_soak

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
FULL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "t"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        "prediction": {"type": "content", "content": "p"},
        "logit_bias": {"3": 1.0},
        "stop": ["x"],
        "n": 2,
        "seed": 1,
        "temperature": 0.5,
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 5,
        "stream": False,
        "metadata": {"a": "b"},
        "chat_template_kwargs": {"x": 1},
    },
    "/v1/completions": {
        "prompt": [[1, 2], [3]],
        "n": 1,
        "best_of": 1,
        "logprobs": 1,
        "stop": "x",
        "max_tokens": 3,
        "structured_outputs": {"regex": "a"},
        "stop_token_ids": [1],
        "draft_depth": 2,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "t"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": []},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "o"},
        ],
        "instructions": "i",
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        "reasoning": {"effort": "low"},
        "include": ["message.output_text.logprobs"],
        "max_output_tokens": 5,
        "metadata": {"a": "b"},
    },
    "/v1/messages": {
        "model": "tiny",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "t"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "h", "signature": "s"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "stop_sequences": ["x"],
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    },
    "/v1/embeddings": {
        "model": "tiny",
        "input": [[1, 2], [3]],
        "dimensions": 4,
        "encoding_format": "base64",
        "truncate_prompt_tokens": -1,
    },
    "/v1/rerank": {"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1, "return_documents": True},
    "/tokenize": {
        "messages": [{"role": "user", "content": "u"}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "return_token_strs": True,
    },
    "/detokenize": {"tokens": [1, 2]},
    "/api/chat": {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "t", "images": ["aGk="]},
            {
                "role": "assistant",
                "content": "",
                "thinking": "h",
                "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
            },
            {"role": "tool", "content": "r", "tool_name": "f", "tool_call_id": "c"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "format": {"type": "object"},
        "options": {
            "temperature": 0.5,
            "top_k": 3,
            "seed": 1,
            "num_predict": 5,
            "stop": ["x"],
            "repeat_penalty": 1.1,
            "repeat_last_n": -1,
            "num_ctx": 64,
            "mirostat": 0,
        },
        "think": "low",
        "keep_alive": "5m",
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
    },
    "/api/generate": {
        "model": "tiny",
        "prompt": "p",
        "system": "s",
        "images": ["aGk="],
        "suffix": "",
        "template": "",
        "context": [],
        "raw": False,
        "format": "json",
        "options": {"min_p": 0.1, "presence_penalty": 0.5},
        "think": False,
        "keep_alive": -1,
        "stream": False,
    },
    "/api/show": {"model": "tiny", "name": "tiny", "verbose": True},
    "/api/pull": {"model": "tiny", "stream": False},
    "/api/embed": {"model": "tiny", "input": ["a", "b"], "truncate": True, "dimensions": 2, "keep_alive": 1},
    "/api/embeddings": {"model": "tiny", "prompt": "a", "options": {}},
}
NUM_EXAMPLES = dict.fromkeys(("/api/show", "/api/pull", "/api/embed", "/api/embeddings"), 10)  # else 120

ODD = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**63,
        2**64,
        10**40,
        0.5,
        -0.5,
        1e300,
        "",
        "auto",
        "none",
        "\x00",
        "😀",
    ]
)
JSON = st.recursive(
    ODD | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, child in inner for place in places(child, (*path, key)))]


def replaced(body: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    body = copy.deepcopy(body)
    here = body
    for key in place[:-1]:
        here = here[key]
    here[place[-1]] = value
    return body


@st.composite
def bodies(draw: st.DrawFn, path: str) -> Any:
    body = FULL[path]
    for _ in range(draw(st.integers(1, 2))):
        body = replaced(body, draw(st.sampled_from(places(body))), draw(JSON))
        if not isinstance(body, dict):
            break
    return body


@pytest.mark.parametrize("path", FULL)
def test_unchanged_request_is_served(path: str) -> None:
    response = Client(server(FakeBackend(CALLS), FakeEmbedder())).post(path, FULL[path])
    assert response.status_code == 200, response.text


@pytest.mark.soak
@pytest.mark.parametrize("path", FULL)
def test_no_body_is_a_500(path: str) -> None:
    client = Client(server(FakeBackend(CALLS), FakeEmbedder()))
    num_examples = in_test_or_soak(NUM_EXAMPLES.get(path, 120), 300)

    @settings(max_examples=num_examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(body=bodies(path))
    def check(body: Any) -> None:
        response: httpx.Response = client.request(
            "POST", path, content=json.dumps(body).encode(), headers={"content-type": "application/json"}
        )
        assert response.status_code < 500, (body, response.text)
        if response.status_code >= 400:
            error = response.json()["error"]
            assert error if path.startswith("/api/") else error["message"]

    check()
    assert client.get("/v1/status").json()["live_requests"] == 0
