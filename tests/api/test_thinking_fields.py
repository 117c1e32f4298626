"""The fields that limit reasoning, in every API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_backend import USER, Client, FakeBackend, server

from outrider.chat.thinking import EFFORT_BUDGETS

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
OLLAMA, GENERATE = "/api/chat", "/api/generate"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    RESPONSES: {"input": "?"},
    MESSAGES: {"messages": USER, "max_tokens": 5},
    OLLAMA: {"model": "tiny", "messages": USER, "stream": False},
    GENERATE: {"model": "tiny", "prompt": "?", "stream": False},
}


def ask(path: str, body: dict[str, Any], status: int = 200) -> tuple[Any, FakeBackend]:
    backend = FakeBackend()
    response = Client(server(backend)).post(path, BODIES[path] | body)
    assert response.status_code == status, response.text
    return response.json(), backend


@pytest.mark.parametrize(
    ("path", "body", "budget"),
    [
        *((path, {}, None) for path in BODIES),
        *((path, {"thinking_token_budget": 12}, 12) for path in BODIES),
        *((path, {"max_thinking_tokens": 12.0}, 12) for path in BODIES),
        *((path, {"thinking_token_budget": -1}, None) for path in BODIES),
        (CHAT, {"reasoning_effort": "none"}, 0),
        (CHAT, {"reasoning_effort": "low"}, None),  # the renderer knows whether the template has efforts
        (RESPONSES, {"reasoning": {"effort": "none"}}, 0),
        (RESPONSES, {"reasoning": {"effort": "low"}}, None),
        (OLLAMA, {"think": False}, 0),
        (OLLAMA, {"think": "low"}, None),
        (MESSAGES, {"thinking": {"type": "disabled"}}, 0),
        (MESSAGES, {"thinking": {"type": "adaptive"}}, None),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, 1024),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 9}, "max_thinking_tokens": 9}, 9),
        (CHAT, {"thinking_token_budget": 8, "max_thinking_tokens": 9}, 8),  # the smallest limit holds
        (CHAT, {"thinking_token_budget": -1, "max_thinking_tokens": 9}, 9),
    ],
)
def test_the_limit_reaches_the_engine(path: str, body: dict[str, Any], budget: int | None) -> None:
    _, backend = ask(path, body)
    assert backend.requests[0].params.thinking_token_budget == budget
    expected = {} if budget in (None, 0) else {"thinking_budget": budget}
    found = {k: v for k, v in backend.requests[0].template_kwargs.items() if k == "thinking_budget"}
    assert found == expected


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {"thinking_token_budget": -7}, "must be 0 or more"),
        (CHAT, {"thinking_token_budget": "many"}, "thinking_token_budget"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": -3}}, "must be 0 or more"),
        (OLLAMA, {"thinking_token_budget": -7}, "must be 0 or more"),
    ],
)
def test_bad_limits_are_refused(path: str, body: dict[str, Any], words: str) -> None:
    answer, backend = ask(path, body, status=400)
    error = answer["error"]
    assert words in (error if isinstance(error, str) else error["message"])
    assert not backend.requests


def test_the_documented_budgets_of_efforts_are_those_of_the_code() -> None:
    text = (Path(__file__).parents[2] / "docs" / "SERVING.md").read_text()
    for effort, budget in EFFORT_BUDGETS.items():
        assert f"| `{effort}` | {budget:,} |" in text
