"""Ollama's chat: messages, options, tools, thinking, formats, and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from fake_backend import CALLS, CUT, FAILED, HELLO, THOUGHT, USAGE, USER
from shared_server import shared_server

from outrider.answer_form import Grammar
from outrider.api.model_card import ModelCard
from outrider.chat.conversation import ChatRequest, MediaPart, Message, TextPart, Tool, ToolCall
from outrider.chat.events import (
    ChatEvent,
    Finished,
    Logprobs,
    TextDelta,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
)
from outrider.engine.sequence import Stats
from outrider.plan import TokenLogprobs
from outrider.request import SamplingDefaults

PATH = "/api/chat"
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Looks outside", "parameters": {"type": "object"}},
}


def ask(body: dict[str, Any], events: Sequence[ChatEvent] = HELLO, status: int = 200, **settings: Any) -> Any:
    client, _ = shared_server(events, **settings)
    response = client.post(PATH, {"model": "tiny", "messages": USER, "stream": False} | body)
    assert response.status_code == status, response.text
    return response.json()


def request_for(body: dict[str, Any], **settings: Any) -> ChatRequest:
    client, backend = shared_server(**settings)
    response = client.post(PATH, {"model": "tiny", "messages": USER, "stream": False} | body)
    assert response.status_code == 200, response.text
    return backend.requests[0]


def refusal(body: dict[str, Any], status: int = 400, **settings: Any) -> str:
    client, backend = shared_server(**settings)
    response = client.post(PATH, {"model": "tiny", "messages": USER, "stream": False} | body)
    assert response.status_code == status, response.text
    assert not backend.streams
    answer = response.json()
    assert list(answer) == ["error"]
    error = answer["error"]
    assert isinstance(error, str)
    return error


# -- answers ---------------------------------------------------------------------------------------------


def test_whole_answer() -> None:
    answer = ask({"model": "tiny:latest"}, THOUGHT)
    assert answer.pop("total_duration") > 0
    assert answer == {
        "model": "tiny:latest",
        "created_at": "2023-11-14T22:13:20Z",
        "message": {"role": "assistant", "content": "Hello wörld", "thinking": "Hmm."},
        "done": True,
        "done_reason": "stop",
        "prompt_eval_count": 7,
        "eval_count": 5,
    }


def test_calls_have_objects_as_arguments() -> None:
    answer = ask({"tools": [TOOL]}, CALLS)
    assert answer["message"] == {
        "role": "assistant",
        "content": "Let me look.",
        "tool_calls": [
            {"id": "call_a", "function": {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}}},
            {"id": "call_b", "function": {"index": 1, "name": "time", "arguments": {}}},
        ],
    }
    assert answer["done_reason"] == "stop"


@pytest.mark.parametrize(
    "arguments", ['{"a": "b', '{"a": 1e999}', "[1]", '{"a": ' + "[" * 900 + "]" * 900 + "}"]
)
def test_calls_without_their_arguments_are_left_out(arguments: str) -> None:
    """Clients run every call that they get."""
    called = (ToolCallStarted(0, "c", "f"), ToolCallArguments(0, arguments), ToolCallEnded(0, arguments))
    answer = ask({"tools": [TOOL]}, (*called, Finished("length", USAGE)))
    assert "tool_calls" not in answer["message"]
    assert answer["done_reason"] == "length"


def test_durations_are_those_of_the_engine() -> None:
    stats = Stats(submitted_s=0.0, queue_s=0.5, ttft_s=2.0, total_s=5.25)
    answer = ask({}, (TextDelta("a"), Finished("stop", USAGE, stats)))
    assert answer["prompt_eval_duration"] == 1_500_000_000
    assert answer["eval_duration"] == 3_250_000_000
    assert isinstance(answer["load_duration"], int)


def test_an_answer_that_is_cut_off_says_so() -> None:
    assert ask({}, CUT)["done_reason"] == "length"


def test_logprobs() -> None:
    tokens = (TokenLogprobs(7, -0.5, ((7, -0.5), (1, -1.5))),)
    events = (TextDelta("h"), Logprobs(tokens), Finished("stop", USAGE))
    answer = ask({"logprobs": True, "top_logprobs": 2}, events)
    assert request_for({"logprobs": True, "top_logprobs": 2}).params.logprobs == 2
    one, other = (
        {"token": "h", "logprob": -0.5, "bytes": [104]},
        {"token": "b", "logprob": -1.5, "bytes": [98]},
    )
    assert answer["logprobs"] == [one | {"top_logprobs": [one, other]}]
    assert request_for({"top_logprobs": 2}).params.logprobs is None
    assert request_for({"logprobs": True}).params.logprobs == 0


def test_a_request_without_messages_loads_the_model() -> None:
    for body in ({"messages": []}, {"messages": None}, {"messages": [], "keep_alive": "5m", "stream": True}):
        answer = ask(body)
        assert (answer["done"], answer["done_reason"]) == (True, "load")
        assert answer["message"] == {"role": "assistant", "content": ""}
        assert answer.keys() == {"model", "created_at", "message", "done", "done_reason"}
    error = refusal({"messages": [], "keep_alive": 0}, 409)
    assert error == "the model 'tiny' stays loaded: it is pinned (--pin), or runs on several ranks"


def test_a_failure_is_an_error() -> None:
    answer = ask({}, FAILED, 500)
    assert list(answer) == ["error"]
    assert "boom" not in answer["error"]


# -- messages --------------------------------------------------------------------------------------------


def test_messages() -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    chat = request_for(
        {
            "messages": [
                {"role": "system", "content": "Be brief"},
                {"role": "User", "content": "Look", "images": ["aGk="]},
                {"role": "assistant", "content": "", "thinking": "Hm", "tool_calls": [call]},
                {"role": "tool", "content": "Rain", "tool_name": "weather"},
            ]
        }
    )
    assert chat.messages == [
        Message("system", (TextPart("Be brief"),)),
        Message("user", (MediaPart("image", "data:;base64,aGk="), TextPart("Look"))),
        Message("assistant", (), "Hm", (ToolCall("call_0", "weather", '{"city": "Oslo"}'),)),
        Message("tool", (TextPart("Rain"),), tool_call_id="call_0", name="weather"),
    ]


def test_images_are_never_addresses() -> None:
    """No server is asked and no file is read for an image."""
    for image in ("http://127.0.0.1/x.png", "file:///etc/passwd", "data:image/png;base64,aGk="):
        chat = request_for({"messages": [{"role": "user", "content": "", "images": [image]}]})
        (part,) = chat.messages[0].content
        assert isinstance(part, MediaPart)
        assert part.source.startswith("data:;base64,")


def calls(*names: str, **ids: str) -> dict[str, Any]:
    made = [
        {"function": {"name": name, "arguments": {}}} | ({"id": ids[name]} if name in ids else {})
        for name in names
    ]
    return {"role": "assistant", "tool_calls": made}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        # By the tool's name, in whatever order the results come.
        (
            [calls("a", "b"), {"role": "tool", "tool_name": "b"}, {"role": "tool", "tool_name": "a"}],
            ["call_1", "call_0"],
        ),
        # Without a name, in the order of the calls.
        ([calls("a", "b"), {"role": "tool"}, {"role": "tool"}], ["call_0", "call_1"]),
        # By the call's id.
        (
            [calls("a", "b", a="x", b="y"), {"role": "tool", "tool_call_id": "y"}, {"role": "tool"}],
            ["y", "x"],
        ),
        # Calls are numbered over all turns.
        ([calls("a"), {"role": "tool"}, calls("a"), {"role": "tool"}], ["call_0", "call_1"]),
        # A result that no call asked for.
        ([{"role": "tool", "tool_name": "a"}], [None]),
    ],
)
def test_results_belong_to_their_calls(messages: list[dict[str, Any]], expected: list[str | None]) -> None:
    chat = request_for({"messages": [*USER, *messages]})
    assert [message.tool_call_id for message in chat.messages if message.role == "tool"] == expected


def test_an_answer_continues_the_assistants_message() -> None:
    begun = [*USER, {"role": "assistant", "content": "Well,"}]
    assert request_for({"messages": begun}).template_kwargs == {"continue_final_message": True}
    assert request_for({"messages": [*USER, calls("a")]}).template_kwargs == {}


def test_tools() -> None:
    other = {"type": "web_search", "name": "search"}
    chat = request_for({"tools": [TOOL, {"function": {"name": "time"}}, other]})
    assert chat.tools == [Tool("weather", "Looks outside", {"type": "object"}), Tool("time")]
    assert chat.tool_choice == "auto"
    assert "used twice" in refusal({"tools": [TOOL, TOOL]})
    assert "tools[0].function" in refusal({"tools": [{"type": "function"}]})


@pytest.mark.parametrize(
    ("format_", "grammar"),
    [
        (None, None),
        ("", None),
        ("json", Grammar("json_object")),
        ({"type": "object"}, Grammar("json_schema", '{"type": "object"}')),
        ({}, Grammar("json_schema", "{}")),
    ],
)
def test_format(format_: Any, grammar: Grammar | None) -> None:
    assert request_for({"format": format_}).grammar == grammar


@pytest.mark.parametrize(
    ("think", "kwargs", "budget"),
    [
        (None, {}, None),
        (True, {"enable_thinking": True}, None),
        (False, {"enable_thinking": False}, 0),
        ("low", {"enable_thinking": True, "reasoning_effort": "low"}, None),
        ("max", {"enable_thinking": True, "reasoning_effort": "max"}, None),
    ],
)
def test_think(think: Any, kwargs: dict[str, Any], budget: int | None) -> None:
    chat = request_for({"think": think})
    assert chat.template_kwargs == kwargs
    assert chat.params.thinking_token_budget == budget


def test_thinking_is_refused_for_a_model_that_does_not_think() -> None:
    client, _ = shared_server(card=ModelCard(thinks=False))
    for think, status in ((True, 400), ("high", 400), (False, 200), (None, 200)):
        body = {"model": "tiny", "messages": USER, "think": think, "stream": False}
        response = client.post(PATH, body)
        assert response.status_code == status
        if status == 400:
            assert response.json() == {"error": '"tiny" does not support thinking'}


# -- options ---------------------------------------------------------------------------------------------


def test_options() -> None:
    params = request_for(
        {
            "options": {
                "temperature": 0.5,
                "top_k": 40,
                "top_p": 0.9,
                "min_p": 0.1,
                "seed": 42,
                "num_predict": 7,
                "stop": ["a", "b"],
                "repeat_penalty": 1.1,
                "presence_penalty": 0.25,
                "frequency_penalty": 0.75,
            }
        }
    ).params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 40, 0.9, 0.1)
    assert (params.seed, params.max_tokens, params.stop) == (42, 7, ["a", "b"])
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.25, 0.75)


def test_options_that_are_left_out_have_the_servers_defaults() -> None:
    sampling = SamplingDefaults(temperature=0.3, repetition_penalty=1.2)
    for options in ({}, None, {"temperature": None, "num_predict": None}):
        params = request_for({"options": options}, sampling=sampling, max_tokens=9).params
        assert (params.temperature, params.repetition_penalty, params.max_tokens) == (0.3, 1.2, 9)


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ({"num_predict": -1}, "max_tokens", 9),
        ({"num_predict": -2}, "max_tokens", 9),
        ({"num_predict": 3.0}, "max_tokens", 3),
        ({"seed": -1}, "seed", None),
        ({"seed": 0}, "seed", 0),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 0}, "top_k", 0),
        ({"repeat_last_n": 0, "repeat_penalty": 1.5}, "repetition_penalty", 1.0),
        ({"repeat_last_n": -1, "repeat_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"repeat_last_n": 64, "repeat_penalty": 1.0}, "repetition_penalty", 1.0),
        ({"repeat_last_n": 64}, "repetition_penalty", 1.0),
        ({"typical_p": 1.0, "tfs_z": 1, "mirostat": 0, "mirostat_tau": 5.0}, "temperature", 1.0),
        ({"num_gpu": 1, "num_thread": 8, "use_mmap": True, "main_gpu": 0, "num_keep": 4}, "temperature", 1.0),
    ],
)
def test_special_values_of_options(options: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(request_for({"options": options}, max_tokens=9).params, field) == value


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_predict": 0}, "options.num_predict: 0 would give no answer"),
        ({"repeat_last_n": 64, "repeat_penalty": 1.1}, "options.repeat_last_n: 64 is not supported"),
        ({"typical_p": 0.7}, "options.typical_p: typical sampling is not supported"),
        ({"tfs_z": 0.5}, "options.tfs_z: tail-free sampling is not supported"),
        ({"mirostat": 1}, "options.mirostat: not supported"),
        ({"repeat_penalty": 0}, "options.repeat_penalty: must be from 0.01 to 100"),
        ({"temperature": -1}, "temperature must be a number from 0 to 100, not -1"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"seed": 2**64}, "seed must be"),
        ({"stop": ["x" * 5000]}, "options.stop: has 5,000 characters"),
        ({"stop": ["x"] * 65}, "options.stop"),
        ({"stop": "x"}, "options.stop: Input should be a valid list"),
        ({"temperature": "hot"}, "options.temperature: Input should be a valid number"),
        ({"num_ctx": "4k"}, "options.num_ctx: Input should be a valid integer"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options: dict[str, Any], words: str) -> None:
    assert words in refusal({"options": options})


def test_repeat_last_n_is_refused_with_the_servers_own_penalty_too() -> None:
    sampling = SamplingDefaults(repetition_penalty=1.2)
    assert "options.repeat_last_n" in refusal({"options": {"repeat_last_n": 64}}, sampling=sampling)


def test_what_has_no_effect_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    request_for({"options": {"num_ctx": 4096, "numa": True, "x\n": 1}, "session": "s"})
    text = caplog.text
    assert "options.num_ctx is 4096, and the context holds 256 tokens" in text
    assert r"unknown options ignored: 'numa', 'x\n'" in text
    assert "unknown fields ignored: session" in text
    caplog.clear()
    request_for({"options": {"num_ctx": 128}, "truncate": True, "shift": False, "keep_alive": "5m"})
    assert "num_ctx" not in caplog.text
    assert "ignored" not in caplog.text


@pytest.mark.parametrize(
    "keep_alive", [0, -1, 300, 1.5, "5m", "1h30m", "-1m", "0", "300ms", "1.5h", "10s", None]
)
def test_keep_alive_is_a_duration(keep_alive: Any) -> None:
    ask({"keep_alive": keep_alive})


@pytest.mark.parametrize("keep_alive", ["", "m", "5x", "5 m", "1e3s", "-", "9" * 1000, "9" * 2000 + "s"])
def test_other_durations_are_refused(keep_alive: str) -> None:
    assert "keep_alive" in refusal({"keep_alive": keep_alive})


def test_debug_render_only_is_refused() -> None:
    assert "_debug_render_only: not supported" in refusal({"_debug_render_only": True})


# -- streams are told from whole answers by `stream` -----------------------------------------------------


def test_answers_are_streamed_unless_the_request_says_otherwise() -> None:
    for body in ({}, {"stream": True}, {"stream": None}):
        response = shared_server(HELLO)[0].post(PATH, {"model": "tiny", "messages": USER} | body)
        assert response.headers["content-type"] == "application/x-ndjson"
        found = [json.loads(line) for line in response.text.splitlines()]
        assert [one["message"]["content"] for one in found] == ["Hello", " wörld", ""]
        assert [one["done"] for one in found] == [False, False, True]
    response = shared_server(HELLO)[0].post(PATH, {"model": "tiny", "messages": USER, "stream": False})
    assert response.headers["content-type"] == "application/json"
