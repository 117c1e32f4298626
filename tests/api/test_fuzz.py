"""Whatever is sent, the answer is never a 500: valid requests with parts replaced by arbitrary JSON."""

from __future__ import annotations

import copy
import json
from typing import Any

import httpx
import pytest
from fake_backend import CALLS, Client, FakeBackend, server
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
}

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
    response = Client(server(FakeBackend(CALLS))).post(path, FULL[path])
    assert response.status_code == 200, response.text


@pytest.mark.soak
@pytest.mark.parametrize("path", FULL)
def test_no_body_is_a_500(path: str) -> None:
    client = Client(server(FakeBackend(CALLS)))

    @settings(max_examples=in_test_or_soak(120, 300), deadline=None, suppress_health_check=list(HealthCheck))
    @given(body=bodies(path))
    def check(body: Any) -> None:
        response: httpx.Response = client.request(
            "POST", path, content=json.dumps(body).encode(), headers={"content-type": "application/json"}
        )
        assert response.status_code < 500, (body, response.text)
        if response.status_code >= 400:
            assert response.json()["error"]["message"]

    check()
    assert client.get("/v1/status").json()["live_requests"] == 0
