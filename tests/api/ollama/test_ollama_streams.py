"""Ollama's streams: whole lines of JSON, answers equal to OpenAI's, signs of life, clients that leave."""

from __future__ import annotations

import asyncio
import codecs
import json
import os
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from asgi_caller import Caller
from fake_backend import (
    CALLS,
    CUT,
    FAILED,
    HELLO,
    THOUGHT,
    USAGE,
    USER,
    Client,
    FakeAnswers,
    FakeBackend,
    Gate,
    server,
)
from httpx._decoders import LineDecoder
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_server import shared_server

from outrider.api import sse
from outrider.chat.events import (
    ChatEvent,
    Finished,
    Logprobs,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
)
from outrider.engine.engine import EngineStopped
from outrider.plan import TokenLogprobs
from outrider.request import InvalidRequest, PromptTooLong
from patience import in_test_or_soak, until

GUARD_S = 60  # ends a test that hangs
GOLDEN = Path(__file__).parents[1] / "golden"
CHAT, GENERATE = "/api/chat", "/api/generate"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": USER},
    GENERATE: {"model": "tiny", "prompt": "Hi"},
}
LOGPROBS: tuple[ChatEvent, ...] = (
    TextDelta("h"),
    Logprobs((TokenLogprobs(7, -0.5, ((7, -0.5), (1, -1.5))),)),
    Finished("stop", USAGE),
)
CASES: dict[str, tuple[str, dict[str, Any], Sequence[ChatEvent]]] = {
    "ollama_chat_text": (CHAT, {}, HELLO),
    "ollama_chat_thinking": (CHAT, {}, THOUGHT),
    "ollama_chat_tools": (CHAT, {}, CALLS),
    "ollama_chat_logprobs": (CHAT, {"logprobs": True, "top_logprobs": 2}, LOGPROBS),
    "ollama_chat_error": (CHAT, {}, FAILED),
    "ollama_generate_thinking": (GENERATE, {}, THOUGHT),
    "ollama_generate_cut": (GENERATE, {"raw": True}, CUT),
}


def lines_of(content: bytes) -> list[dict[str, Any]]:
    assert content.endswith(b"\n")
    return [json.loads(line) for line in content[:-1].split(b"\n")]


@pytest.mark.parametrize("case", CASES)
def test_stream_is_as_recorded(case: str) -> None:
    """OUTRIDER_WRITE_GOLDEN=1 writes the transcripts anew. Only the duration differs from run to run."""
    path, extra, events = CASES[case]
    response = Client(server(FakeBackend(events)), **{"x-request-id": "golden"}).post(
        path, BODIES[path] | extra
    )
    text = re.sub(r'"total_duration": [0-9]+', '"total_duration": 0', response.text)
    file = GOLDEN / f"{case}.ndjson"
    if os.environ.get("OUTRIDER_WRITE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


# -- the same answer as OpenAI's -------------------------------------------------------------------------

# Also characters at which some readers end a line.
TEXTS = st.text(
    st.characters(codec="utf-8") | st.sampled_from('\n\r\x0b\x0c\x1c\x1e\x85\u2028\u2029"\\'), max_size=12
)
ARGUMENTS = st.dictionaries(
    TEXTS, TEXTS | st.integers() | st.none() | st.lists(TEXTS, max_size=2), max_size=3
)


def call_events(index: int, name: str, arguments: str) -> list[ChatEvent]:
    middle = len(arguments) // 2
    parts = (arguments[:middle], arguments[middle:])
    return [
        ToolCallStarted(index, f"call_{index}", name),
        *(ToolCallArguments(index, part) for part in parts),
        ToolCallEnded(index, arguments),
    ]


@st.composite
def answers(draw: st.DrawFn) -> list[ChatEvent]:
    events: list[ChatEvent] = [ReasoningDelta(text) for text in draw(st.lists(TEXTS, max_size=3))]
    events += [TextDelta(text) for text in draw(st.lists(TEXTS, max_size=4))]
    arguments = draw(st.lists(ARGUMENTS, max_size=2))
    for index, one in enumerate(arguments):
        events += call_events(index, f"f{index}", json.dumps(one, ensure_ascii=draw(st.booleans())))
    reason = "tool_calls" if arguments else draw(st.sampled_from(["stop", "length"]))
    return [*events, Finished(reason, USAGE)]


def from_openai(message: dict[str, Any], reason: str) -> tuple[Any, ...]:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return (
        message["content"] or "",
        message.get("reasoning_content", ""),
        [(call["name"], json.loads(call["arguments"])) for call in calls],
        {"tool_calls": "stop"}.get(reason, reason),
    )


def from_ollama(parts: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
    messages = [part["message"] for part in parts]
    functions = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert [function["index"] for function in functions] == list(range(len(functions)))
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    return (
        "".join(message["content"] for message in messages),
        "".join(message.get("thinking", "") for message in messages),
        [(function["name"], function["arguments"]) for function in functions],
        parts[-1]["done_reason"],
    )


def cut(data: bytes, places: Sequence[int]) -> Iterator[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return (data[begin:end] for begin, end in pairwise(ends))


def read_in_chunks(chunks: Iterator[bytes]) -> list[dict[str, Any]]:
    """As Ollama's Python client reads a stream. Its lines end wherever str.splitlines ends one."""
    text, lines = codecs.getincrementaldecoder("utf-8")(), LineDecoder()
    found = [line for chunk in chunks for line in lines.decode(text.decode(chunk))]
    return [json.loads(line) for line in [*found, *lines.decode(text.decode(b"", True)), *lines.flush()]]


@pytest.mark.soak
@given(answers(), st.lists(st.integers(0, 10_000), max_size=20))
@settings(deadline=None, max_examples=in_test_or_soak(25, 1500))
def test_answers_equal_those_of_openais_api(events: list[ChatEvent], places: list[int]) -> None:
    client, _ = shared_server(events)
    (choice,) = client.post("/v1/chat/completions", {"messages": USER}).json()["choices"]
    expected = from_openai(choice["message"], choice["finish_reason"])
    whole = client.post(CHAT, BODIES[CHAT] | {"stream": False}).json()
    assert from_ollama([whole]) == expected
    streamed = client.post(CHAT, BODIES[CHAT]).content
    assert from_ollama(lines_of(streamed)) == expected
    assert from_ollama(read_in_chunks(cut(streamed, places))) == expected


# -- signs of life, errors, clients that leave -----------------------------------------------------------


class SlowBackend(FakeBackend):
    """Waits before it has prepared an answer."""

    hold: Callable[[], Awaitable[None]]

    async def prepare(self, *args: Any) -> FakeAnswers:
        await self.hold()
        return await super().prepare(*args)


def text_of(path: str, part: dict[str, Any]) -> str:
    text = part["message"]["content"] if path == CHAT else part["response"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_shows_life_in_whole_lines(path: str) -> None:
    """Before its prompt is prepared, and between its tokens: a client fails on a line that is no JSON."""
    backend = SlowBackend(HELLO)
    made = server(backend, keep_alive_s=0.01)

    async def run() -> bytes:
        caller = Caller(path, BODIES[path])

        async def until_two_more_lines() -> None:
            num_before = caller.received.count(b"\n")
            await until(lambda: caller.received.count(b"\n") >= num_before + 2)

        backend.hold = backend.gate = until_two_more_lines
        await asyncio.wait_for(caller.call(made), GUARD_S)
        assert caller.status == 200
        return caller.received

    found = lines_of(asyncio.run(run()))
    assert len(found) >= 2 * len(HELLO) + len(HELLO)
    assert "".join(text_of(path, part) for part in found) == "Hello wörld"
    assert [part["done"] for part in found] == [False] * (len(found) - 1) + [True]


@pytest.mark.parametrize("path", BODIES)
def test_the_first_sign_comes_after_a_second_and_not_after_a_whole_keep_alive(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "FIRST_KEEP_ALIVE_S", 0.01)
    backend = FakeBackend(HELLO)
    made = server(backend, keep_alive_s=GUARD_S)

    async def run() -> bytes:
        caller = Caller(path, BODIES[path])
        backend.gate = lambda: until(lambda: b"\n" in caller.received)
        await asyncio.wait_for(caller.call(made), GUARD_S)
        return caller.received

    assert "".join(text_of(path, part) for part in lines_of(asyncio.run(run()))) == "Hello wörld"


TOO_LONG = PromptTooLong("the prompt has 9 tokens", "9 tokens", 8)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (InvalidRequest("the picture is broken"), "the picture is broken"),
        (TOO_LONG, "This model's maximum context length is 8 tokens"),
        (EngineStopped("x"), "the server is shutting down"),
        (ValueError("secret"), "internal error"),
    ],
)
def test_an_error_after_the_begin_is_the_last_line(path: str, failure: Exception, words: str) -> None:
    backend = SlowBackend()
    made = server(backend, keep_alive_s=0.01)

    async def run() -> bytes:
        caller = Caller(path, BODIES[path])

        async def hold() -> None:
            await until(lambda: caller.status == 200)
            raise failure

        backend.hold = hold
        await asyncio.wait_for(caller.call(made), GUARD_S)
        return caller.received

    *_, last = lines_of(asyncio.run(run()))
    assert list(last) == ["error"]
    assert words in last["error"]
    assert "secret" not in last["error"]
    assert made.context.live.num_live == 0


@pytest.mark.parametrize("path", BODIES)
def test_an_error_before_the_begin_has_its_status(path: str) -> None:
    backend = SlowBackend()

    async def hold() -> None:
        raise TOO_LONG

    backend.hold = hold
    response = Client(server(backend)).post(path, BODIES[path])
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert "9 tokens" in response.json()["error"]


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("path", BODIES)
def test_client_that_leaves_frees_its_row(path: str, streams: bool) -> None:
    gate = Gate(num_events=1)
    backend = FakeBackend(HELLO, gate=gate)
    made = server(backend)

    async def run() -> None:
        caller = Caller(path, BODIES[path] | {"stream": streams})
        calling = asyncio.create_task(caller.call(made))
        await asyncio.wait_for(gate.holds.wait(), GUARD_S)
        caller.gone.set()
        await asyncio.wait_for(calling, GUARD_S)

    asyncio.run(run())
    (stream,) = backend.streams
    assert stream.aborted
    assert made.context.live.num_live == 0
    api = f"ollama_{path.removeprefix('/api/')}"
    assert made.context.live.metrics.finished.labels(api, "abandoned")._value.get() == 1


def test_a_request_has_a_line_in_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    Client(server(FakeBackend())).post(CHAT, BODIES[CHAT] | {"model": "tiny:latest"})
    (record,) = [record for record in caplog.records if record.name == "outrider.access"]
    fields = record.fields  # type: ignore[attr-defined]
    assert (fields["route"], fields["status"], fields["api"], fields["model"]) == (
        CHAT,
        200,
        "ollama_chat",
        "tiny:latest",
    )
    assert (fields["tokens"], fields["finish"]) == (5, ["stop"])
