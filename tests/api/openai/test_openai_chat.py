"""Chat completions: every documented parameter is honoured, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_backend import CALLS, CUT, FAILED, HELLO, THOUGHT, USAGE, USER, Client, FakeBackend, server

from outrider.answer_form import Grammar
from outrider.chat.conversation import ChatRequest, MediaPart, Message, NamedTool, TextPart, Tool, ToolCall
from outrider.chat.events import Finished, Logprobs, TextDelta, TokenDetail, TokenOrigins
from outrider.engine.sequence import TokenOrigin
from outrider.plan import TokenLogprobs
from outrider.request import SamplingParams, SpecPrefill

PATH = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Looks outside",
        "parameters": {"type": "object"},
        "strict": True,
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def ask(body: dict[str, Any], backend: FakeBackend | None = None, status: int = 200) -> Any:
    response = Client(server(backend or FakeBackend())).post(PATH, {"messages": USER} | body)
    assert response.status_code == status, response.text
    return response.json()


def request_for(body: dict[str, Any]) -> ChatRequest:
    backend = FakeBackend()
    ask(body, backend)
    return backend.requests[0]


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({}, "max_tokens", None),
        ({"max_tokens": 5}, "max_tokens", 5),
        ({"max_completion_tokens": 6}, "max_tokens", 6),
        ({"temperature": 0}, "temperature", 0),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"top_k": 7}, "top_k", 7),
        ({"top_k": -1}, "top_k", 0),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"seed": 11}, "seed", 11),
        ({"presence_penalty": 1.5}, "presence_penalty", 1.5),
        ({"frequency_penalty": -1}, "frequency_penalty", -1),
        ({"repetition_penalty": 1.2}, "repetition_penalty", 1.2),
        ({"logit_bias": {"5": -100}}, "logit_bias", {5: -100}),
        ({"stop": "end"}, "stop_strings", ("end",)),
        ({"stop": ["a", "b"]}, "stop_strings", ("a", "b")),
        ({"stop": []}, "stop_strings", ()),
        ({"stop": ""}, "stop_strings", ()),
        ({"stop_token_ids": [3]}, "stop_token_ids", [3]),
        ({"min_tokens": 2}, "min_tokens", 2),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"skip_special_tokens": False}, "skip_special_tokens", False),
        ({"draft_depth": 3}, "draft_depth", 3),
        ({"draft_depth": "auto"}, "draft_depth", "auto"),
        ({"spec_prefill": {"keep": 0.3}}, "spec_prefill", SpecPrefill(0.3)),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": True, "top_logprobs": 4}, "logprobs", 4),
        ({"logprobs": False}, "logprobs", None),
    ],
)
def test_sampling_parameter_reaches_the_engine(body: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(request_for(body).params, field) == value


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            Grammar("json_schema", json.dumps(SCHEMA)),
        ),
        ({"guided_json": SCHEMA}, Grammar("json_schema", json.dumps(SCHEMA))),
        ({"guided_json": '{"type":"null"}'}, Grammar("json_schema", '{"type":"null"}')),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
        ({"guided_choice": ["yes", "a.b"]}, Grammar("regex", r"yes|a\.b")),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", json.dumps(SCHEMA))),
        ({"structured_outputs": {"regex": "b"}}, Grammar("regex", "b")),
        ({"structured_outputs": {"choice": ["x"]}}, Grammar("regex", "x")),
        ({"structured_outputs": {"grammar": "g"}}, Grammar("lark", "g")),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
    ],
)
def test_format_becomes_a_grammar(body: dict[str, Any], grammar: Grammar | None) -> None:
    assert request_for(body).grammar == grammar


@pytest.mark.parametrize(
    ("body", "kwargs"),
    [
        ({}, {}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"chat_template_kwargs": {"x": 1}, "enable_thinking": True}, {"x": 1, "enable_thinking": True}),
        (
            {"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": True},
            {"enable_thinking": False},
        ),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"continue_final_message": True}, {"continue_final_message": True}),
    ],
)
def test_template_variables(body: dict[str, Any], kwargs: dict[str, Any]) -> None:
    assert request_for(body).template_kwargs == kwargs


def test_messages_of_every_role() -> None:
    request = request_for(
        {
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {"role": "system", "content": [{"type": "text", "text": "And kind."}]},
                {
                    "role": "user",
                    "name": "Ada",
                    "content": [
                        {"type": "text", "text": "What is"},
                        {"type": "image_url", "image_url": {"url": "http://x/y.png", "detail": "auto"}},
                        {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}},
                        {"type": "video_url", "video_url": {"url": "http://x/y.mp4"}},
                    ],
                },
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "hm",
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "42"},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                {"role": "user", "content": "Hi"},
            ]
        }
    )
    assert request.messages == [
        Message("system", (TextPart("Be brief."),)),
        Message("system", (TextPart("And kind."),)),
        Message(
            "user",
            (
                TextPart("What is"),
                MediaPart("image", "http://x/y.png"),
                MediaPart("audio", "data:audio/wav;base64,QUJD"),
                MediaPart("video", "http://x/y.mp4"),
            ),
            name="Ada",
        ),
        Message("assistant", (), "hm", (ToolCall("c1", "f", "{}"),)),
        Message("tool", (TextPart("42"),), tool_call_id="c1"),
        Message("assistant", (TextPart("No."),)),
        Message("user", (TextPart("Hi"),)),
    ]


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        (None, "auto", ["weather", "clock"]),
        ("auto", "auto", ["weather", "clock"]),
        ("none", "none", ["weather", "clock"]),
        ("required", "required", ["weather", "clock"]),
        ({"type": "function", "function": {"name": "clock"}}, NamedTool("clock"), ["weather", "clock"]),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CLOCK]}},
            "required",
            ["clock"],
        ),
    ],
)
def test_tool_choice(choice: Any, expected: Any, names: list[str]) -> None:
    request = request_for({"tools": [WEATHER, CLOCK], "tool_choice": choice, "parallel_tool_calls": False})
    assert request.tool_choice == expected
    assert [tool.name for tool in request.tools] == names
    assert not request.parallel_tool_calls
    if len(names) == 2:
        assert request.tools[0] == Tool("weather", "Looks outside", {"type": "object"}, strict=True)


def test_bans_and_cuts_are_passed_on() -> None:
    body = {"allowed_token_ids": [3, 4.0], "bad_words": ["no"], "truncate_prompt_tokens": 7}
    params = request_for(body | {"include_stop_str_in_output": True}).params
    assert (params.allowed_token_ids, params.bad_words) == ([3, 4], ["no"])
    assert (params.truncate_prompt_tokens, params.include_stop_str_in_output) == (7, True)


def test_prediction_is_passed_on() -> None:
    assert request_for({"prediction": {"type": "content", "content": "abc"}}).prediction == "abc"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert request_for({"prediction": {"type": "content", "content": parts}}).prediction == "ab"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"verbosity": "low"}, "verbosity"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"logits_processors": ["x"]}, "logits_processors"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": ["x"]}, "allowed_token_ids"),
        ({"allowed_token_ids": list(range(65_537))}, "allowed_token_ids"),
        ({"bad_words": "x"}, "bad_words"),
        ({"bad_words": ["x" * 65]}, "bad_words"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
        ({"bad_words": [" "]}, None),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, None),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"documents": [{}]}, "documents"),
        ({"echo": True}, "echo"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [""]}, None),
        ({"n": 0}, "n"),
        ({"n": -3}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"max_tokens": 0}, None),
        ({"temperature": -1}, None),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, None),
        ({"top_k": -2}, None),
        ({"seed": 2**70}, None),
        ({"seed": 1.5}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-3": 1}}, None),
        ({"draft_depth": 9}, None),
        ({"spec_prefill": {"keep": 0}}, None),
        ({"spec_prefill": {"keep": 1.5}}, None),
        ({"spec_prefill": {}}, "spec_prefill"),
        ({"spec_prefill": 0.3}, "spec_prefill"),
        ({"draft_depth": "deep"}, "draft_depth"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f"}}, *USER]},
            "messages[0].function_call",
        ),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [CLOCK, CLOCK]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(body: dict[str, Any], param: str | None) -> None:
    error = ask(body, status=400)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    if param is not None:
        assert (error["param"] or "").startswith(param)


@pytest.mark.parametrize(
    "body",
    [
        {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h"},
        {"service_tier": "flex"},
        {"store": True},
        {"verbosity": "medium"},
        {"functions": None, "suffix": None, "best_of": None},
        {"modalities": ["text"]},
        {"prompt_cache_options": {"mode": "implicit"}},
    ],
)
def test_bookkeeping_fields_change_nothing(body: dict[str, Any]) -> None:
    assert request_for(body).params == SamplingParams(max_tokens=None)
    assert ask(body)["service_tier"] == "default"


def test_unknown_fields_are_ignored_with_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="outrider.api.body")
    ask({"frobnicate": 1, "zap": 2})
    assert [record.message for record in caplog.records] == ["unknown fields ignored: frobnicate, zap"]


def test_metadata_is_echoed() -> None:
    assert ask({"metadata": {"a": "b"}})["metadata"] == {"a": "b"}


def test_whole_answer() -> None:
    answer = ask({"model": "other"}, FakeBackend(THOUGHT))
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "other"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Hello wörld",
                "refusal": None,
                "reasoning_content": "Hmm.",
            },
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {
            "reasoning_tokens": 2,
            "accepted_prediction_tokens": 1,
            "rejected_prediction_tokens": 2,
        },
    }


def test_tool_calls_without_text_have_null_content() -> None:
    choice = ask({"tools": [WEATHER]}, FakeBackend(CALLS[1:]))["choices"][0]
    assert choice["message"]["content"] is None
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather", "time"]
    assert choice["finish_reason"] == "tool_calls"


def test_cut_answer_says_length() -> None:
    assert ask({}, FakeBackend(CUT))["choices"][0]["finish_reason"] == "length"


def test_engine_error_is_a_500_whose_details_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    client = Client(server(FakeBackend(FAILED)), **{"x-request-id": "abc-1"})
    error = client.post(PATH, {"messages": USER}).json()["error"]
    message = error.pop("message")
    assert error == {"type": "server_error", "param": None, "code": None}
    assert message.startswith("internal error")
    assert "abc-1" in message
    assert "boom" not in message
    assert "the model failed: boom" in caplog.text


def test_n_choices_are_n_requests_with_seeds_that_count_up() -> None:
    backend = FakeBackend(answer=lambda r: (TextDelta(str(r.params.seed)), Finished("stop", USAGE)))
    answer = ask({"n": 3, "seed": 5}, backend)
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["5", "6", "7"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["usage"]["completion_tokens"] == 15


def test_unseeded_choices_stay_unseeded() -> None:
    backend = FakeBackend()
    ask({"n": 2}, backend)
    assert [request.params.seed for request in backend.requests] == [None, None]


TOKENS = (
    TokenLogprobs(7, -0.25, ((7, -0.25), (26, -1.5))),
    TokenLogprobs(26, float("-inf"), ()),
)


def test_logprobs_have_strings_and_bytes() -> None:
    backend = FakeBackend((TextDelta("h"), Logprobs(TOKENS), Finished("stop", USAGE)))
    content = ask({"logprobs": True, "top_logprobs": 2}, backend)["choices"][0]["logprobs"]["content"]
    torn = {"token": "\\xc3", "bytes": [0xC3]}
    assert content == [
        {
            "token": "h",
            "logprob": -0.25,
            "bytes": [104],
            "top_logprobs": [{"token": "h", "logprob": -0.25, "bytes": [104]}, {**torn, "logprob": -1.5}],
        },
        {**torn, "logprob": -9999.0, "top_logprobs": []},
    ]


def frames(text: str) -> list[Any]:
    lines = [block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def stream(body: dict[str, Any], backend: FakeBackend) -> list[Any]:
    response = Client(server(backend)).post(PATH, {"messages": USER, "stream": True} | body)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return frames(response.text)


def test_streamed_logprobs_all_arrive() -> None:
    for events in (
        (Logprobs(TOKENS), TextDelta("h"), Finished("stop", USAGE)),
        (TextDelta("h"), Logprobs(TOKENS), Finished("stop", USAGE)),
    ):
        chunks = stream({"logprobs": True}, FakeBackend(events))
        logprobs = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
        assert [len(one["content"]) for one in logprobs if one] == [2]


ORIGINS = (
    TokenOrigins((TokenDetail(7, TokenOrigin("head", 1), -0.5), TokenDetail(8, TokenOrigin("bonus"), -1.5))),
    TextDelta("hi"),
    Logprobs(TOKENS),
    TokenOrigins((TokenDetail(26, TokenOrigin("plain")),)),  # its text is held back until the end
    Finished("stop", USAGE),
)
RENDERED_ORIGINS = [
    {"token": "h", "origin": "head", "place": 1, "logprob": -0.5},
    {"token": "i", "origin": "bonus", "logprob": -1.5},
    {"token": "\\xc3", "origin": "plain"},
]


def test_token_origins_are_in_a_whole_answer() -> None:
    backend = FakeBackend(ORIGINS)
    answer = Client(server(backend)).post(PATH, {"messages": USER, "return_token_origins": True}).json()
    assert answer["choices"][0]["token_origins"] == RENDERED_ORIGINS
    assert backend.requests[0].params.token_origins


@pytest.mark.parametrize("logprobs", [True, False])
def test_streamed_token_origins_come_with_their_text(logprobs: bool) -> None:
    chunks = stream({"return_token_origins": True, "logprobs": logprobs}, FakeBackend(ORIGINS))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    with_origins = [choice for choice in choices if "token_origins" in choice]
    assert [choice["delta"]["content"] for choice in with_origins] == ["hi", ""]
    assert [one for choice in with_origins for one in choice["token_origins"]] == RENDERED_ORIGINS


def test_answers_have_no_token_origins_unless_asked() -> None:
    backend = FakeBackend(HELLO)
    assert "token_origins" not in Client(server(backend)).post(PATH, {"messages": USER}).text
    assert not backend.requests[0].params.token_origins
    bad = Client(server(backend)).post(PATH, {"messages": USER, "return_token_origins": "yes"})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "return_token_origins")


def test_every_choice_of_a_stream_ends_with_its_finish_reason() -> None:
    chunks = stream({"n": 3}, FakeBackend(HELLO))
    for index in range(3):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in own) == "Hello wörld"
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["stop"]


def test_stream_that_fails_says_so_before_it_ends() -> None:
    last = stream({}, FakeBackend(FAILED))[-1]
    assert last["error"]["message"].startswith("internal error")


def test_service_that_raises_in_mid_stream_still_gives_an_end() -> None:
    class Broken(FakeBackend):
        def start(self, request: ChatRequest) -> Any:
            made = super().start(request)

            async def fail() -> Any:
                yield TextDelta("a")
                raise RuntimeError("parser broke")

            made.__class__ = type("Broken", (made.__class__,), {"__aiter__": lambda self: fail()})
            return made

    message = stream({}, Broken())[-1]["error"]["message"]
    assert "internal error" in message
    assert "parser broke" not in message


@pytest.mark.parametrize("name", ["tiny", "other", "models/tiny", None])
def test_model_is_known_by_its_names_and_its_path(name: str | None) -> None:
    ask({"model": name})


@pytest.mark.parametrize("name", ["default", "gpt-4", ""])
def test_unknown_model_is_a_404(name: str) -> None:
    error = ask({"model": name}, status=404)["error"]
    assert error["code"] == "model_not_found"
    assert "'tiny'" in error["message"]
