"""What the APIs tell of the prefix cache, and who shares it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fake_backend import FACTS, USER, Client, FakeBackend, FakeTokenizer, server, settings

from outrider.api.app import create_server
from outrider.chat.events import Finished, TextDelta, Usage
from patience import PATIENCE_S
from server_process import ServerProcess

END = Finished("stop", Usage(num_prompt=100, num_cached=60, num_generated=5, num_stored=30))
LONG = [{"role": "user", "content": "Tell me a long story about a fox. " * 20}]


def _answered(path: str, body: dict[str, Any]) -> Any:
    backend = FakeBackend([TextDelta("hi"), END])
    response = Client(server(backend)).post(path, body)
    assert response.status_code == 200, response.text
    return response.json()["usage"]


def test_openai_counts_cached_tokens() -> None:
    usage = _answered("/v1/chat/completions", {"messages": USER})
    assert usage["prompt_tokens"] == 100
    assert usage["prompt_tokens_details"] == {"cached_tokens": 60}
    usage = _answered("/v1/responses", {"input": "hi"})
    assert usage["input_tokens_details"] == {"cached_tokens": 60, "cache_write_tokens": 30}


@pytest.mark.parametrize(
    ("system", "created"),
    [
        ("be kind", 0),
        ([{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}], 30),
        ('say "cache_control": {}', 0),
    ],
)
def test_anthropic_counts_what_was_put_in_for_those_who_asked(system: Any, created: int) -> None:
    usage = _answered("/v1/messages", {"messages": USER, "max_tokens": 9, "system": system})
    assert usage["cache_read_input_tokens"] == 60
    assert usage["cache_creation_input_tokens"] == created
    assert usage["input_tokens"] == 40 - created


def _salt(body: dict[str, Any], **headers: str) -> str:
    backend = FakeBackend()
    client = Client(server(backend), **headers)
    assert client.post("/v1/chat/completions", {"messages": USER} | body).status_code == 200
    salt: str = backend.requests[0].params.cache_salt
    return salt


def test_who_sends_another_key_or_salt_shares_nothing() -> None:
    salts = [
        _salt({}),
        _salt({"cache_salt": "a"}),
        _salt({"cache_salt": "b"}),
        _salt({}, authorization="Bearer one"),
        _salt({}, authorization="Bearer two"),
        _salt({"cache_salt": "a"}, authorization="Bearer one"),
    ]
    assert len(set(salts)) == len(salts)
    assert not any("one" in salt for salt in salts), "the key itself goes no further"
    assert _salt({}, authorization="Bearer one") == _salt({}, **{"x-api-key": "one"})


def test_without_a_prefix_cache_there_is_nothing_to_delete() -> None:
    client = Client(server(FakeBackend()))
    assert client.request("DELETE", "/v1/cache").status_code == 404
    assert client.request("GET", "/v1/status").json()["prefix_cache"] is None


class _Numbers:
    def gauges(self) -> dict[str, int]:
        return {"bytes": 7, "disk_bytes": 3}

    def counts(self) -> dict[str, int]:
        return {"hit_tokens": 11, "disk_refused": 1}


class _Engine:
    def prefix_status(self) -> _Numbers:
        return _Numbers()

    def clear_prefix_cache(self) -> int:
        return 7


def test_status_metrics_and_delete_speak_of_it() -> None:
    made = create_server(FakeBackend(), FACTS, FakeTokenizer(), settings(), prefix_cache=_Engine())
    client = Client(made)
    status = client.request("GET", "/v1/status").json()["prefix_cache"]
    assert status == {"bytes": 7, "disk_bytes": 3, "hit_tokens": 11, "disk_refused": 1}
    metrics = client.request("GET", "/metrics").text
    assert "outrider_prefix_cache_bytes 7.0" in metrics
    assert "outrider_prefix_cache_hit_tokens_total 11.0" in metrics
    assert client.request("DELETE", "/v1/cache").json()["freed_bytes"] == 7


def test_deleting_needs_the_key() -> None:
    client = Client(server(FakeBackend(), api_key="secret"))
    assert client.request("DELETE", "/v1/cache").status_code == 401


def test_a_real_servers_second_answer_is_cached_until_it_is_told_to_forget(live: ServerProcess) -> None:
    body = {"messages": LONG, "max_tokens": 4, "temperature": 0, "cache_salt": "this test"}
    counts = [live.post("/v1/chat/completions", body).json() for _ in range(2)]
    prompt = counts[0]["usage"]["prompt_tokens"]
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in counts]
    assert cached == [0, prompt - 1]
    assert counts[0]["choices"][0]["message"] == counts[1]["choices"][0]["message"]
    assert live.get("/v1/status")["prefix_cache"]["bytes"] > 0
    assert live.metric("outrider_prefix_cache_hit_tokens_total") >= prompt - 1
    live.wait_until_idle()
    freed = httpx.delete(f"{live.url}/v1/cache", timeout=PATIENCE_S).json()
    assert freed["deleted"] is True
    assert freed["freed_bytes"] > 0
    assert live.get("/v1/status")["prefix_cache"]["bytes"] == 0
    again = live.post("/v1/chat/completions", body).json()["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == 0
