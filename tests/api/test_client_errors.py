"""Errors and ends of streams in the shape on which clients act: OpenAI's and Anthropic's own SDKs and agents."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from fake_backend import USER, Client, FakeBackend, server

from outrider.request import PromptTooLong

CLAUDE_CODE = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE)
LITELLM = "this model's maximum context length is"  # in the message, in lower case
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
}
TOO_LONG = PromptTooLong("the prompt has 300 tokens and the context holds 256: shorten it", "300 tokens", 256)


def refused(path: str, failure: Exception = TOO_LONG, **fields: Any) -> dict[str, Any]:
    response = Client(server(FakeBackend(failure=failure))).post(path, BODIES[path] | fields)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


# -- a prompt that is too long ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_openais_clients_recognise_a_prompt_that_is_too_long(path: str, stream: bool) -> None:
    error = refused(path, stream=stream)
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert LITELLM in error["message"].lower()
    assert "256 tokens. The prompt has 300 tokens" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_claude_code_recognises_a_prompt_that_is_too_long(stream: bool) -> None:
    error = refused("/v1/messages", stream=stream)
    assert error == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 300 tokens > 255 maximum",
    }


@pytest.mark.parametrize("size", ["300 tokens", "about 20000 tokens", "more than 514 tokens"])
def test_claude_code_reads_the_numbers_also_if_they_are_estimates(size: str) -> None:
    found = CLAUDE_CODE.search(refused("/v1/messages", PromptTooLong("x", size, 256))["message"])
    assert found is not None
    assert found.groups() == (re.sub(r"\D", "", size), "255")


def test_a_response_that_is_too_long_is_a_400_or_a_failed_stream() -> None:
    """Codex finds the error in the stream's event only."""
    assert refused("/v1/responses")["code"] == "context_length_exceeded"
    response = Client(server(FakeBackend(failure=TOO_LONG))).post(
        "/v1/responses", {"input": "Hi", "stream": True}
    )
    assert response.status_code == 200
    events = [json.loads(data) for data in re.findall(r"^data: (.+)$", response.text, re.MULTILINE)]
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.failed",
    ]
    last = events[-1]["response"]
    assert last["status"] == "failed"
    assert last["error"]["code"] == "context_length_exceeded"
    assert LITELLM in last["error"]["message"].lower()
