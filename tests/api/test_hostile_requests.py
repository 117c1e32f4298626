"""Requests that once stopped a running server: each is refused with a reason, and the server serves on."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from patience import PATIENCE_S
from server_process import CONTEXT, ServerProcess

CHAT, PLAIN, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
USER = [{"role": "user", "content": "Hi"}]
MB = 1_000_000


def text_of_size(num_bytes: int) -> str:
    return "Once upon a time there was a server. " * (num_bytes // 37)


def chat(**changes: Any) -> Callable[[], Any]:
    return lambda: {"messages": USER, "max_tokens": 1} | changes


def says(text: str, **changes: Any) -> Any:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1} | changes


# Bodies are functions: made when they are sent, so that they are not all in memory.
HOSTILE: dict[str, tuple[str, Callable[[], Any], str]] = {
    "8,000 wrong messages": (CHAT, chat(messages=[0] * 8_000), "messages[0]"),
    "290,000 wrong messages": (CHAT, chat(messages=[0] * 290_000), "messages[0]"),
    "400,000 wrong messages": (CHAT, chat(messages=[0] * 400_000), "limit is 300,000"),
    "100,000 wrong entries": (CHAT, chat(metadata=dict.fromkeys(map(str, range(100_000)), 0)), "metadata"),
    "a stop string of 10 MB": (CHAT, lambda: says("Hi", stop="x" * 10 * MB), "stop: has 10,000,000"),
    "4 stop strings of 7 MB": (CHAT, lambda: says("Hi", stop=["x" * 7 * MB] * 4), "stop: has 28,000,000"),
    "1,000 stop sequences": (MESSAGES, chat(stop_sequences=["x"] * 1000), "stop_sequences"),
    "a prompt of 30 MB": (CHAT, lambda: says(text_of_size(30 * MB)), f"context holds {CONTEXT}"),
    "a system prompt of 3 MB": (
        MESSAGES,
        lambda: says("Hi", system=text_of_size(3 * MB)),
        f"tokens > {CONTEXT - 1} maximum",
    ),
    "a text of 3 MB": (
        PLAIN,
        lambda: {"prompt": text_of_size(3 * MB)},
        f"context holds {CONTEXT}",
    ),
    "a text of 3 MB to count": (
        f"{MESSAGES}/count_tokens",
        lambda: {"messages": says(text_of_size(3 * MB))["messages"]},
        f"tokens > {CONTEXT - 1} maximum",
    ),
    "a text just over the context": (PLAIN, lambda: {"prompt": "x y " * CONTEXT}, f"context holds {CONTEXT}"),
    "160,000 answers": (PLAIN, lambda: {"prompt": ["x"] * 1250, "n": 128}, "160,000 requests"),
    "1,000 tools of one name": (
        CHAT,
        chat(tools=[{"type": "function", "function": {"name": "f"}}] * 1000),
        "used twice",
    ),
    "integers of 4,000 digits": (CHAT, lambda: says("Hi", x=[10**3999] * 100), "digits"),
    "a nested unknown field": (CHAT, lambda: says("Hi", x=json.loads("[" * 900 + "]" * 900)), "nested"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_request_is_refused_and_the_server_serves_on(live: ServerProcess, case: str) -> None:
    path, body, words = HOSTILE[case]
    response = live.post(path, body())
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
    assert len(response.content) < 2000
    assert httpx.get(f"{live.url}/health", timeout=PATIENCE_S).status_code == 200
    assert live.post(CHAT, says("Hi")).status_code == 200
    assert live.wait_until_idle()["live_bytes"] == 0


def test_answers_that_share_a_rendering_equal_answers_on_their_own(live: ServerProcess) -> None:
    body = {"messages": USER, "max_tokens": 8, "temperature": 1.0}
    together = live.post(CHAT, body | {"n": 3, "seed": 5}).json()["choices"]
    alone = [live.post(CHAT, body | {"seed": seed}).json()["choices"][0] for seed in (5, 6, 7)]
    assert [choice["message"] for choice in together] == [choice["message"] for choice in alone]
    assert len({choice["message"]["content"] for choice in together}) > 1


def test_admission_counts_answers_bytes_and_tokens(live: ServerProcess) -> None:
    request = {"messages": USER, "n": 3, "stream": True, "max_tokens": 2000, "ignore_eos": True}
    with httpx.stream("POST", live.url + CHAT, json=request, timeout=PATIENCE_S) as response:
        chunks = response.iter_bytes()  # the stream is closed when this iterator is dropped
        next(chunks)
        status = live.get("/v1/status")
    assert status["live_requests"] == 3
    assert status["live_bytes"] == int(response.request.headers["content-length"])
    assert status["live_tokens"] == 3 * status["requests"][0]["prompt_tokens"]
    status = live.wait_until_idle()
    assert status["live_tokens"] == status["live_bytes"] == 0
