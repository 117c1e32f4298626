"""Anthropic's messages: blocks, tools, thinking, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_backend import CALLS, CUT, FAILED, THOUGHT, USAGE, USER, Client, FakeBackend, server

from outrider.answer_form import Grammar
from outrider.chat.conversation import ChatRequest, MediaPart, Message, NamedTool, TextPart, Tool, ToolCall
from outrider.chat.events import Finished, TextDelta, ToolCallArguments, ToolCallEnded, ToolCallStarted

PATH = "/v1/messages"
TOOL = {"name": "weather", "description": "Looks outside", "input_schema": {"type": "object"}}


def ask(body: dict[str, Any], backend: FakeBackend | None = None, status: int = 200) -> Any:
    response = Client(server(backend or FakeBackend())).post(
        PATH, {"messages": USER, "max_tokens": 5, "model": "tiny"} | body
    )
    assert response.status_code == status, response.text
    return response.json()


def request_for(body: dict[str, Any]) -> ChatRequest:
    backend = FakeBackend()
    ask(body, backend)
    return backend.requests[0]


def test_whole_message() -> None:
    assert ask({"thinking": {"type": "adaptive"}}, FakeBackend(THOUGHT)) == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [
            {"type": "thinking", "thinking": "Hmm.", "signature": "outrider"},
            {"type": "text", "text": "Hello wörld"},
        ],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": 5,
            "output_tokens_details": {"thinking_tokens": 2},
        },
    }


@pytest.mark.parametrize("display", ["summarized", "updates", None])
def test_thinking_is_shown_whole(display: str | None) -> None:
    """Claude Code asks for updates when its output is a stream of events."""
    body = {"thinking": {"type": "adaptive", "display": display}}
    assert ask(body, FakeBackend(THOUGHT))["content"][0]["thinking"] == "Hmm."


def test_thinking_can_be_hidden() -> None:
    body = {"thinking": {"type": "enabled", "budget_tokens": 2000, "display": "omitted"}}
    assert ask(body, FakeBackend(THOUGHT))["content"][0]["thinking"] == ""


def test_tool_use() -> None:
    message = ask({"tools": [TOOL]}, FakeBackend(CALLS))
    assert message["stop_reason"] == "tool_use"
    assert message["content"][1:] == [
        {"type": "tool_use", "id": "call_a", "name": "weather", "input": {"city": "Oslo"}},
        {"type": "tool_use", "id": "call_b", "name": "time", "input": {}},
    ]


def test_call_that_is_cut_off_still_ends_its_block() -> None:
    events = (
        ToolCallStarted(0, "c", "f"),
        ToolCallArguments(0, '{"a": "b'),
        Finished("length", USAGE),
    )
    message = ask({}, FakeBackend(events))
    assert message["content"] == [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]
    assert message["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": "\\ud800"}', {"a": "\ud800"}),  # half of a surrogate pair
        ('{"a": 1e999}', {}),  # infinity, as Python reads it
        ('{"a": ' + "[" * 900 + "]" * 900 + "}", {}),  # deeper than Python's json module can write
        ('{"a": 1' + "0" * 5000 + "}", {}),  # more digits than Python reads
        ("[1]", {}),
    ],
)
def test_arguments_that_python_cannot_write_as_json_do_not_break_the_answer(
    arguments: str, expected: dict[str, Any]
) -> None:
    """A grammar allows all of these if the client's schema does."""
    called = (ToolCallStarted(0, "c", "f"), ToolCallArguments(0, arguments), ToolCallEnded(0, arguments))
    message = ask({"tools": [TOOL]}, FakeBackend((*called, Finished("tool_calls", USAGE))))
    assert message["content"] == [{"type": "tool_use", "id": "c", "name": "f", "input": expected}]
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("events", "max_tokens", "reason", "sequence"),
    [
        (CUT, 5, "max_tokens", None),
        (CUT, 6, "model_context_window_exceeded", None),
        ((TextDelta("a"), Finished("stop", USAGE, stop_string="END")), 5, "stop_sequence", "END"),
        ((Finished("stop", USAGE),), 5, "end_turn", None),
    ],
)
def test_stop_reasons(events: Any, max_tokens: int, reason: str, sequence: str | None) -> None:
    message = ask({"max_tokens": max_tokens}, FakeBackend(events))
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({"max_tokens": 9}, "max_tokens", 9),
        ({"temperature": 0.3}, "temperature", 0.3),
        ({"top_p": 0.3}, "top_p", 0.3),
        ({"top_k": 3}, "top_k", 3),
        ({"stop_sequences": list("abcdef")}, "stop_strings", tuple("abcdef")),
        ({"seed": 3, "draft_depth": 0}, "draft_depth", 0),
    ],
)
def test_sampling_parameter_reaches_the_engine(body: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(request_for(body).params, field) == value


@pytest.mark.parametrize(
    ("body", "kwargs"),
    [
        ({}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "adaptive"}}, {}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"enable_thinking": True, "thinking_budget": 1024},
        ),
        ({"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
        (
            {"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}},
            {"reasoning_effort": "high"},
        ),
    ],
)
def test_template_variables(body: dict[str, Any], kwargs: dict[str, Any]) -> None:
    assert request_for(body).template_kwargs == kwargs


def test_prefilled_answer_is_continued() -> None:
    request = request_for({"messages": [*USER, {"role": "assistant", "content": "The answer is"}]})
    assert request.template_kwargs["continue_final_message"] is True
    assert request.messages[-1] == Message("assistant", (TextPart("The answer is"),))


def test_structured_output() -> None:
    body = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "null"}}}}
    assert request_for(body).grammar == Grammar("json_schema", '{"type": "null"}')


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        (None, "auto", True),
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "weather"}, NamedTool("weather"), True),
    ],
)
def test_tool_choice(choice: Any, expected: Any, parallel: bool) -> None:
    request = request_for({"tools": [TOOL | {"eager_input_streaming": True}], "tool_choice": choice})
    assert request.tools == [Tool("weather", "Looks outside", {"type": "object"})]
    assert request.tool_choice == expected
    assert request.parallel_tool_calls == parallel


def test_blocks_become_messages() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    request = request_for(
        {
            "system": [{"type": "text", "text": "Be brief."} | cached, {"type": "text", "text": "Be kind."}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Weather?"} | cached]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "text", "text": "I look."},
                        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Åre"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": "rain"} | cached,
                        {
                            "type": "tool_result",
                            "tool_use_id": "t2",
                            "is_error": True,
                            "content": [{"type": "text", "text": "no such place"}],
                        },
                        {"type": "tool_result", "tool_use_id": "t3"},
                        {"type": "text", "text": "So?"},
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": "AA"},
                        },
                        {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}},
                        {"type": "video", "source": {"type": "url", "url": "http://x/y.mp4"}},
                        {
                            "type": "document",
                            "title": "Notes",
                            "source": {"type": "text", "media_type": "text/plain", "data": "abc"},
                        },
                    ],
                },
                {"role": "system", "content": "Now in French."},
                {"role": "user", "content": "Go on"},
            ],
        }
    )
    assert request.messages == [
        Message("system", (TextPart("Be brief."), TextPart("Be kind."))),
        Message("user", (TextPart("Weather?"),)),
        Message("assistant", (TextPart("I look."),), "hm", (ToolCall("t1", "weather", '{"city": "Åre"}'),)),
        Message("tool", (TextPart("rain"),), tool_call_id="t1"),
        Message("tool", (TextPart("Error: "), TextPart("no such place")), tool_call_id="t2"),
        Message("tool", (), tool_call_id="t3"),
        Message(
            "user",
            (
                TextPart("So?"),
                MediaPart("image", "data:image/png;base64,AA"),
                MediaPart("image", "http://x/y.png"),
                MediaPart("video", "http://x/y.mp4"),
                TextPart("Notes\nabc"),
            ),
        ),
        Message("system", (TextPart("Now in French."),)),
        Message("user", (TextPart("Go on"),)),
    ]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        (
            {
                "tools": [{"type": "bash_20250124", "name": "bash"}],
                "tool_choice": {"type": "tool", "name": "bash"},
            },
            "tool_choice: names 'bash', which is not among the tools that can be called here",
        ),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "any"}},
            "tool_choice",
        ),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL | {"input_examples": [{}]}]}, "tools[0].input_examples"),
        ({"tools": [TOOL, TOOL]}, "twice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "search_result"}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
            "messages[0].content[0]",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "document", "source": {"type": "url", "url": "http://x"}}],
                    }
                ]
            },
            "a document source must be of type text",
        ),
        ({"stop_sequences": [""]}, "stop"),
        ({"system": 5}, "system"),
        ({"temperature": 1000}, "temperature"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(body: dict[str, Any], words: str) -> None:
    error = ask(body, status=400)
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert words in error["error"]["message"]
    assert error["request_id"]


def test_unknown_model_is_a_404_in_anthropics_shape() -> None:
    assert ask({"model": "claude"}, status=404)["error"]["type"] == "not_found_error"


def test_engine_error_is_an_api_error() -> None:
    error = ask({}, FakeBackend(FAILED), status=500)["error"]
    assert error["type"] == "api_error"
    assert error["message"].startswith("internal error")


def test_stream_that_fails_ends_with_an_error_event() -> None:
    response = Client(server(FakeBackend(FAILED))).post(
        PATH, {"messages": USER, "max_tokens": 5, "stream": True}
    )
    assert response.text.strip().split("\n\n")[-1].startswith("event: error\ndata: ")
    assert "message_stop" not in response.text


def test_count_tokens() -> None:
    backend = FakeBackend()
    body = {"messages": USER, "model": "tiny", "system": "Be brief.", "tools": [TOOL]}
    response = Client(server(backend)).post(f"{PATH}/count_tokens", body)
    assert response.json() == {"input_tokens": 11}
    assert backend.requests[0].tools
    assert not backend.streams


def test_a_deferred_tool_is_described_where_a_tool_result_names_it() -> None:
    later = {"name": "tides", "description": "Asks the sea", "input_schema": {"type": "object"}}
    found = [{"type": "tool_reference", "tool_name": name} for name in ("tides", "stars")]
    messages = [
        *USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "search", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": found}]},
    ]
    request = request_for({"messages": messages, "tools": [TOOL, later | {"defer_loading": True}]})
    assert [(tool.name, tool.is_deferred) for tool in request.tools] == [("weather", False), ("tides", True)]
    described, missing = request.messages[-1].content
    assert isinstance(described, TextPart)
    assert json.loads(described.text)["function"]["description"] == "Asks the sea"
    assert missing == TextPart("The tool stars is not available.")
