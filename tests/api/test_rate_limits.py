"""The limits of a key: refused over the limit with the time to wait, and other keys notice nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_backend import HELLO, USAGE, USER, Client, FakeBackend, Gate, server
from hypothesis import given
from hypothesis import strategies as st

from outrider.api.errors import ApiError
from outrider.api.keys import ApiKey, KeyLimits, new_key
from outrider.api.load import WORDS, Load
from outrider.api.rate_limits import KeyUsage, KeyUsages, TokenBucket

CHAT = "/v1/chat/completions"
BODY = {"messages": USER}
NUM_PROMPT_TOKENS = 7  # of a FakeStream
NUM_TOKENS = NUM_PROMPT_TOKENS + USAGE.num_generated


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def usage(**limits: int) -> tuple[KeyUsage, Clock]:
    clock = Clock()
    return KeyUsage(ApiKey("alice", limits=KeyLimits(**limits)), clock), clock


def retry_after_s(refused: pytest.ExceptionInfo[ApiError]) -> int:
    assert refused.value.status_code == 429
    assert refused.value.headers is not None
    return int(refused.value.headers["Retry-After"])


# -- one key ---------------------------------------------------------------------------------------------


def test_a_minutes_requests_may_come_at_once_and_then_steadily() -> None:
    alice, clock = usage(requests_per_minute=3)
    for _ in range(3):
        alice.count_request()
    with pytest.raises(ApiError) as refused:
        alice.count_request()
    clock.now_s += retry_after_s(refused)
    alice.count_request()
    with pytest.raises(ApiError) as refused:
        alice.count_request()
    assert retry_after_s(refused) == 20
    clock.now_s += 3600
    assert alice.headers()["x-ratelimit-remaining-requests"] == "3", "unused requests do not add up"


def test_tokens_that_were_used_too_much_are_owed() -> None:
    alice, clock = usage(tokens_per_minute=60)
    alice.check_tokens()
    alice.count_tokens(180)
    with pytest.raises(ApiError) as refused:
        alice.check_tokens()
    assert retry_after_s(refused) == 121  # 120 owed and one to begin with, at one a second
    clock.now_s += 120
    with pytest.raises(ApiError):
        alice.check_tokens()
    clock.now_s += 1
    alice.check_tokens()


def test_headers_are_openais() -> None:
    alice, clock = usage(requests_per_minute=60, tokens_per_minute=600)
    alice.count_request()
    alice.count_tokens(700)
    clock.now_s += 0.5
    assert alice.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "0.500s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "69.500s",
    }
    assert usage()[0].headers() == {}


def test_new_limits_hold_at_once_and_rows_stay_counted() -> None:
    usages = KeyUsages(Clock())
    alice = usages.of(ApiKey("alice", limits=KeyLimits(max_rows=2)))
    alice.hold(Load(), Load(2))
    assert usages.of(ApiKey("alice", limits=KeyLimits(max_rows=3))) is alice
    alice.hold(Load(), Load(1))
    with pytest.raises(ApiError, match="3 requests that run or wait, of at most 3"):
        alice.hold(Load(), Load(1))
    assert usages.of(ApiKey("bob")) is not alice


@pytest.mark.parametrize("name", ["num_requests", "num_bytes", "num_tokens"])
def test_a_key_holds_no_more_than_its_limits(name: str) -> None:
    alice, _ = usage(max_rows=10, max_live_bytes=10, max_live_tokens=10)
    first = Load(**{name: 6})
    alice.hold(Load(), first)
    with pytest.raises(ApiError, match=f"6 {WORDS[name]}, of at most 10") as refused:
        alice.hold(Load(), Load(**{name: 5}))
    assert (refused.value.status_code, retry_after_s(refused)) == (429, 2)
    with pytest.raises(ApiError, match=f"needs 11 {WORDS[name]}, and the key 'alice' may have 10") as refused:
        alice.hold(first, Load(**{name: 5}))
    assert refused.value.status_code == 400
    alice.release(first)
    alice.hold(Load(), Load(**{name: 10}))
    assert alice.held == Load(**{name: 10})


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 50)), max_size=50))
def test_over_any_time_a_bucket_gives_no_more_than_its_rate(uses: list[tuple[float, int]]) -> None:
    """At most a full bucket, the rate times the time, and one use that goes below zero."""
    clock = Clock()
    bucket, taken = TokenBucket(60, clock), 0
    for wait_s, amount in uses:
        clock.now_s += wait_s
        if bucket.level >= 1:
            bucket.take(amount)
            taken += amount
        assert bucket.level <= 60
    assert taken <= 60 + clock.now_s + 50


# -- over HTTP -------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.touch(mode=0o600)
    return path


def add(file: Path, name: str, **limits: int) -> dict[str, str]:
    """Add a key to the file and return its header."""
    key, table = new_key(name, limits=KeyLimits(**limits))
    file.write_text(file.read_text() + table)
    return {"x-api-key": key}


def test_requests_a_minute(file: Path) -> None:
    alice, bob = add(file, "alice", requests_per_minute=2), add(file, "bob")
    made = server(FakeBackend(), api_keys_file=str(file))
    answers = [
        Client(made, **alice).post(path, BODY | {"max_tokens": 5}) for path in (CHAT, "/v1/messages", CHAT)
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers.get("x-ratelimit-remaining-requests") for answer in answers] == ["1", "0", "0"]
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
    other = Client(made, **bob).post(CHAT, BODY)
    assert other.status_code == 200
    assert not [name for name in other.headers if name.startswith("x-ratelimit")]


def test_every_request_with_a_key_counts_except_health_checks(file: Path) -> None:
    alice = add(file, "alice", requests_per_minute=3)
    client = Client(server(FakeBackend(), api_keys_file=str(file)), **alice)
    counted = [client.get(path) for path in ("/v1/models", "/metrics", "/no/such/route", "/v1/models")]
    assert [answer.status_code for answer in counted] == [200, 403, 404, 429]
    assert int(counted[3].headers["retry-after"]) >= 1
    free = [client.get(path) for path in ("/health", "/health/live", "/health/ready")]
    assert [answer.status_code for answer in free] == [200, 200, 200]


def test_tokens_a_minute_count_prompt_and_answers(file: Path) -> None:
    limit = 2 * NUM_TOKENS + 1
    alice = add(file, "alice", tokens_per_minute=limit)
    made = server(FakeBackend(), api_keys_file=str(file))
    client = Client(made, **alice)
    assert client.post(CHAT, BODY | {"n": 2}).status_code == 200
    assert client.post(CHAT, BODY | {"stream": True}).status_code == 200  # one token was left
    refused = client.post(CHAT, BODY)
    assert refused.status_code == 429
    assert "tokens a minute" in refused.json()["error"]["message"]
    owed = NUM_TOKENS  # less what the bucket gains while the test runs
    assert owed / 2 < int(refused.headers["retry-after"]) * limit / 60 <= owed + 3
    assert client.post("/v1/messages/count_tokens", BODY).status_code == 200, "counting needs no tokens"


def test_rows_at_once(file: Path) -> None:
    alice, bob = add(file, "alice", max_rows=2), add(file, "bob")
    gate = Gate(num_events=0)
    made = server(FakeBackend(HELLO, gate=gate), api_keys_file=str(file))
    refused: list[httpx.Response] = []

    async def run() -> None:
        transport: Any = httpx.ASGITransport(made.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            first = asyncio.create_task(http.post(CHAT, json=BODY | {"n": 2}, headers=alice))
            await gate.holds.wait()
            refused.append(await http.post(CHAT, json=BODY, headers=alice))
            other = asyncio.create_task(http.post(CHAT, json=BODY, headers=bob))
            gate.open()
            assert (await first).status_code == (await other).status_code == 200
            refused.append(await http.post(CHAT, json=BODY | {"n": 3}, headers=alice))
            assert (await http.post(CHAT, json=BODY | {"n": 2}, headers=alice)).status_code == 200

    asyncio.run(run())
    assert [answer.status_code for answer in refused] == [429, 400]
    assert refused[0].headers["retry-after"]
    assert "2 requests that run or wait, of at most 2" in refused[0].json()["error"]["message"]
    assert made.context.live.num_live == 0


@pytest.mark.parametrize("limit", ["max_live_bytes", "max_live_tokens"])
def test_bodies_and_prompts_at_once(file: Path, limit: str) -> None:
    most = {"max_live_bytes": len(json.dumps(BODY)) + 5, "max_live_tokens": NUM_PROMPT_TOKENS + 1}[limit]
    alice = add(file, "alice", **{limit: most})
    gate = Gate(num_events=0)
    made = server(FakeBackend(HELLO, gate=gate), api_keys_file=str(file))

    async def run() -> list[int]:
        transport: Any = httpx.ASGITransport(made.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            first = asyncio.create_task(http.post(CHAT, json=BODY, headers=alice))
            await gate.holds.wait()
            second = await http.post(CHAT, json=BODY, headers=alice)
            gate.open()
            return [(await first).status_code, second.status_code]

    assert asyncio.run(run()) == [200, 429]
    assert made.context.live.num_live == 0


def test_without_limits_nothing_is_counted() -> None:
    client = Client(server(FakeBackend(), api_key="k"), **{"x-api-key": "k"})
    answer = client.post(CHAT, BODY)
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
