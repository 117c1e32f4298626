"""What goes over the wire, to the byte, and that the official clients' own types accept every event of it.

OUTRIDER_WRITE_GOLDEN=1 writes the transcripts anew; read the difference before you keep it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from fake_backend import CALLS, CUT, FAILED, HELLO, THOUGHT, USAGE, USER, Client, FakeBackend, server
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from outrider.api.context import FINGERPRINT
from outrider.chat.events import ChatEvent, Finished, Logprobs, ReasoningDelta, TextDelta
from outrider.plan import TokenLogprobs

GOLDEN = Path(__file__).parent / "golden"
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USAGE_TOO = {"stream_options": {"include_usage": True}}
TOKEN = TokenLogprobs(7, -0.5, ((7, -0.5), (1, -1.5)))
LOGPROBS: tuple[ChatEvent, ...] = (TextDelta("h"), Logprobs((TOKEN,)), Finished("stop", USAGE))
THINK_CALL: tuple[ChatEvent, ...] = (ReasoningDelta("I must look."), *CALLS[1:5], CALLS[-1])

CASES: dict[str, tuple[str, dict[str, Any], Sequence[ChatEvent]]] = {
    "chat_text": (CHAT, {}, HELLO),
    "chat_reasoning_and_usage": (CHAT, USAGE_TOO, THOUGHT),
    "chat_tools": (CHAT, {}, CALLS),
    "chat_logprobs": (CHAT, {"logprobs": True, "top_logprobs": 2}, LOGPROBS),
    "chat_error": (CHAT, {}, FAILED),
    "completions_text": (PLAIN, {"echo": True, **USAGE_TOO}, CUT),
    "completions_logprobs": (PLAIN, {"logprobs": 2}, LOGPROBS),
    "responses_text": (RESPONSES, {}, HELLO),
    "responses_reasoning_and_call": (RESPONSES, {}, THINK_CALL),
    "responses_tools": (RESPONSES, {}, CALLS),
    "responses_incomplete": (RESPONSES, {}, CUT),
    "responses_logprobs": (RESPONSES, {"top_logprobs": 2}, LOGPROBS),
    "responses_error": (RESPONSES, {}, FAILED),
    "messages_text": (MESSAGES, {}, HELLO),
    "messages_thinking_and_call": (MESSAGES, {}, THINK_CALL),
    "messages_tools": (MESSAGES, {}, CALLS),
    "messages_cut": (MESSAGES, {}, CUT),
    "messages_error": (MESSAGES, {}, FAILED),
}
EVENT_TYPES: dict[str, TypeAdapter[Any]] = {
    CHAT: TypeAdapter(ChatCompletionChunk),
    PLAIN: TypeAdapter(Completion),
    RESPONSES: TypeAdapter(ResponseStreamEvent),
    MESSAGES: TypeAdapter(RawMessageStreamEvent),
}
WHOLE_TYPES: dict[str, TypeAdapter[Any]] = {
    CHAT: TypeAdapter(ChatCompletion),
    PLAIN: TypeAdapter(Completion),
    RESPONSES: TypeAdapter(OpenAIResponse),
    MESSAGES: TypeAdapter(AnthropicMessage),
}


def body_for(path: str, extra: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {
        CHAT: {"messages": USER},
        PLAIN: {"prompt": "Hi "},
        RESPONSES: {"input": "Hi"},
        MESSAGES: {"messages": USER, "max_tokens": 5},
    }
    return own[path] | extra


def transcript(case: str) -> str:
    path, extra, events = CASES[case]
    client = Client(server(FakeBackend(events)), **{"x-request-id": "golden"})
    response = client.post(path, body_for(path, extra) | {"stream": True})
    assert response.status_code == 200, response.text
    return response.text.replace(FINGERPRINT, "outrider-VERSION")


@pytest.mark.parametrize("case", CASES)
def test_stream_is_as_recorded(case: str) -> None:
    file = GOLDEN / f"{case}.sse"
    text = transcript(case)
    if os.environ.get("OUTRIDER_WRITE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize("case", CASES)
def test_official_types_accept_every_event(case: str) -> None:
    adapter = EVENT_TYPES[CASES[case][0]]
    for block in transcript(case).strip().split("\n\n"):
        name, _, data = block.rpartition("data: ")
        if data == "[DONE]" or name.strip() in ("event: ping", "event: error") or data.startswith('{"error"'):
            continue
        event = json.loads(data)
        assert name.strip() in ("", f"event: {event.get('type')}")
        for choice in event.get("choices", ()) if event.get("object") == "text_completion" else ():
            choice["finish_reason"] = choice["finish_reason"] or "stop"  # null on the wire, not in the type
        adapter.validate_python(event)


@pytest.mark.parametrize("case", [case for case in CASES if not case.endswith("_error")])
def test_official_types_accept_the_whole_answer(case: str) -> None:
    path, extra, events = CASES[case]
    extra = {name: value for name, value in extra.items() if name != "stream_options"}
    response = Client(server(FakeBackend(events))).post(path, body_for(path, extra))
    WHOLE_TYPES[path].validate_python(response.json())


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("responses_")])
def test_response_events_are_numbered_and_end_with_the_whole(case: str) -> None:
    events = [json.loads(block.rpartition("data: ")[2]) for block in transcript(case).strip().split("\n\n")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["id"] for item in done] == added
    assert events[-1]["response"]["output"] == done
