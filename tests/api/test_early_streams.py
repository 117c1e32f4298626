"""Streams that show life before the first token: while a prompt is prepared, queued and computed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from asgi_caller import Caller
from fake_backend import HELLO, USER, Client, FakeAnswers, FakeBackend, server

from outrider.api import sse
from outrider.chat.events import PromptProgress
from outrider.engine.engine import EngineStopped
from outrider.request import InvalidRequest, PromptTooLong
from patience import until

GUARD_S = 60  # ends a test that hangs
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 5},
    "/v1/completions": {"prompt": "Hi", "echo": True},
}
SIGNS = dict.fromkeys(BODIES, b": keep-alive") | {"/v1/messages": b"event: ping"}
TOO_LONG = PromptTooLong("the prompt has 9 tokens", "9 tokens", 8)


class SlowBackend(FakeBackend):
    """Waits before it has prepared an answer."""

    hold: Callable[[], Awaitable[None]]

    async def prepare(self, *args: Any) -> FakeAnswers:
        await self.hold()
        return await super().prepare(*args)

    async def prepare_text(self, *args: Any) -> FakeAnswers:
        await self.hold()
        return await super().prepare_text(*args)


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_begins_while_its_prompt_is_prepared(path: str) -> None:
    backend = SlowBackend(HELLO)
    made = server(backend, keep_alive_s=0.01)

    async def run() -> Caller:
        caller = Caller(path, BODIES[path] | {"stream": True})

        async def hold() -> None:
            await until(lambda: caller.received.count(SIGNS[path]) >= 2)
            assert not backend.streams
            assert caller.status == 200

        backend.hold = hold
        await asyncio.wait_for(caller.call(made), GUARD_S)
        return caller

    caller = asyncio.run(run())
    assert "Hello" in caller.received.decode()
    assert "wörld" in caller.received.decode()
    assert made.context.live.num_live == 0


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (InvalidRequest("the picture is broken"), "the picture is broken"),
        (TOO_LONG, {"/v1/messages": "prompt is too long: 9 tokens > 7 maximum"}),
        (EngineStopped("x"), "the server is shutting down"),
        (ValueError("secret"), "internal error"),
    ],
)
def test_an_error_after_the_begin_is_an_event_of_the_stream(
    path: str, failure: Exception, words: str | dict[str, str]
) -> None:
    backend = SlowBackend()
    made = server(backend, keep_alive_s=0.01)

    async def run() -> str:
        caller = Caller(path, BODIES[path] | {"stream": True})

        async def hold() -> None:
            await until(lambda: caller.status == 200)
            raise failure

        backend.hold = hold
        await asyncio.wait_for(caller.call(made), GUARD_S)
        return caller.received.decode()

    text = asyncio.run(run())
    expected = (
        words if isinstance(words, str) else words.get(path, "This model's maximum context length is 8")
    )
    frames = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert expected in json.dumps(frames[-1])
    assert "error" in frames[-1] or frames[-1]["type"] in ("error", "response.failed")
    assert "secret" not in text
    assert not backend.streams
    assert made.context.live.num_live == 0


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/v1/responses"])
def test_an_error_before_the_begin_has_its_status(path: str) -> None:
    backend = SlowBackend()

    async def hold() -> None:
        raise TOO_LONG

    backend.hold = hold
    response = Client(server(backend)).post(path, BODIES[path] | {"stream": True})
    assert response.status_code == 400
    assert "9 tokens" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
def test_client_that_leaves_an_early_stream_frees_its_place(path: str) -> None:
    backend = SlowBackend()
    made = server(backend, keep_alive_s=0.01)

    async def run() -> bool:
        caller = Caller(path, BODIES[path] | {"stream": True})
        was_cancelled = False

        async def hold() -> None:
            nonlocal was_cancelled
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                was_cancelled = True
                raise

        backend.hold = hold
        calling = asyncio.create_task(caller.call(made))
        await until(lambda: SIGNS[path] in caller.received)
        caller.gone.set()
        await asyncio.wait_for(calling, GUARD_S)
        await until(lambda: was_cancelled)
        return was_cancelled

    assert asyncio.run(run())
    assert made.context.live.num_live == 0
    assert not backend.streams


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_whose_prompt_is_prepared_shows_life_after_a_second(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "FIRST_KEEP_ALIVE_S", 0.01)
    backend = SlowBackend(HELLO)
    made = server(backend, keep_alive_s=GUARD_S)

    async def run() -> bytes:
        caller = Caller(path, BODIES[path] | {"stream": True})
        backend.hold = lambda: until(lambda: SIGNS[path] in caller.received)
        await asyncio.wait_for(caller.call(made), GUARD_S)
        return caller.received

    assert b"Hello" in asyncio.run(run())


@pytest.mark.parametrize("path", BODIES)
def test_the_first_sign_comes_after_a_second_and_not_after_a_whole_keep_alive(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sse.FIRST_KEEP_ALIVE_S <= 1
    monkeypatch.setattr(sse, "FIRST_KEEP_ALIVE_S", 0.01)
    backend = FakeBackend(HELLO)
    made = server(backend, keep_alive_s=GUARD_S)

    async def run() -> bytes:
        caller = Caller(path, BODIES[path] | {"stream": True})
        num_at_start = path == "/v1/messages"  # a message starts with a ping
        backend.gate = lambda: until(lambda: caller.received.count(SIGNS[path]) == 1 + num_at_start)
        await asyncio.wait_for(caller.call(made), GUARD_S)
        return caller.received

    assert b"Hello" in asyncio.run(run())


# -- progress --------------------------------------------------------------------------------------------

PROGRESS = (PromptProgress(64, 32, 200, 0.25), PromptProgress(200, 32, 200, 1.0))


def test_progress_of_the_prompt_is_in_the_stream_for_those_who_ask() -> None:
    backend = FakeBackend((*PROGRESS, *HELLO))
    body = {"messages": USER, "stream": True, "return_progress": True}
    response = Client(server(backend)).post("/v1/chat/completions", body)
    assert backend.requests[0].params.prompt_progress
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    found = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert found == [
        {"total": 200, "cache": 32, "processed": 64, "time_ms": 250},
        {"total": 200, "cache": 32, "processed": 200, "time_ms": 1000},
    ]
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hello wörld"


def test_progress_is_not_the_first_token() -> None:
    made = server(FakeBackend((*PROGRESS, HELLO[-1])))
    Client(made).post("/v1/chat/completions", {"messages": USER, "stream": True, "return_progress": True})
    assert made.context.live.metrics.first_token_s.labels("chat")._sum.get() == 0


def test_progress_needs_a_stream() -> None:
    response = Client(server(FakeBackend())).post(
        "/v1/chat/completions", {"messages": USER, "return_progress": True}
    )
    assert response.status_code == 400
    assert "return_progress: is allowed only with stream: true" in response.json()["error"]["message"]
