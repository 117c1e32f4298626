"""Responses: input items, the store, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_backend import CALLS, CUT, FAILED, HELLO, THOUGHT, USAGE, Client, FakeBackend, server

from outrider.answer_form import Grammar
from outrider.api.openai.response_store import ResponseStore, StoredResponse
from outrider.chat.conversation import ChatRequest, MediaPart, Message, NamedTool, TextPart, Tool, ToolCall
from outrider.chat.events import Finished, ToolCallEnded, ToolCallStarted

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}


def ask(body: dict[str, Any], backend: FakeBackend | None = None, status: int = 200) -> Any:
    response = Client(server(backend or FakeBackend())).post(PATH, {"input": "Hi"} | body)
    assert response.status_code == status, response.text
    return response.json()


def request_for(body: dict[str, Any]) -> ChatRequest:
    backend = FakeBackend()
    ask(body, backend)
    return backend.requests[0]


def test_whole_response() -> None:
    answer = ask({"metadata": {"k": "v"}, "user": "u", "instructions": "Be brief."}, FakeBackend(THOUGHT))
    assert answer["object"] == "response"
    assert answer["status"] == "completed"
    assert answer["metadata"] == {"k": "v"}
    assert answer["instructions"] == "Be brief."
    reasoning, message = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hmm."}]
    assert message["content"][0]["text"] == "Hello wörld"
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 2


def test_cut_response_is_incomplete() -> None:
    answer = ask({}, FakeBackend(CUT))
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"


def test_failed_response_is_a_500_or_an_event() -> None:
    assert ask({}, FakeBackend(FAILED), status=500)["error"]["message"].startswith("internal error")
    response = Client(server(FakeBackend(FAILED))).post(PATH, {"input": "Hi", "stream": True})
    last = json.loads(response.text.strip().rpartition("data: ")[2])
    assert last["type"] == "response.failed"
    error = last["response"]["error"]
    assert error["code"] == "server_error"
    assert error["message"].startswith("internal error")


def test_parameters_reach_the_engine() -> None:
    request = request_for(
        {
            "instructions": "Be brief.",
            "max_output_tokens": 9,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 4,
            "top_logprobs": 3,
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "null"}}},
            "tools": [TOOL],
            "tool_choice": {"type": "function", "name": "weather"},
            "parallel_tool_calls": False,
            "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
        }
    )
    assert request.messages == [
        Message("system", (TextPart("Be brief."),)),
        Message("user", (TextPart("Hi"),)),
    ]
    assert (request.params.max_tokens, request.params.temperature, request.params.seed) == (9, 0.5, 4)
    assert (request.params.top_p, request.params.logprobs) == (0.9, 3)
    assert request.grammar == Grammar("json_schema", '{"type": "null"}')
    assert request.tools == [Tool("weather", "", {"type": "object"}, strict=True)]
    assert request.tool_choice == NamedTool("weather")
    assert not request.parallel_tool_calls
    assert request.template_kwargs == {"reasoning_effort": "low"}


def test_input_items_become_messages() -> None:
    request = request_for(
        {
            "input": [
                {"role": "developer", "content": "Be kind."},
                {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
                {
                    "type": "reasoning",
                    "id": "r",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "hm"}],
                },
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "I look."}],
                },
                {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
                {"type": "function_call", "call_id": "d", "name": "clock", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "rain"},
                {
                    "type": "function_call_output",
                    "call_id": "d",
                    "output": [{"type": "input_text", "text": "9"}],
                },
                {
                    "type": "message",
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": "data:image/png;base64,AA"},
                        {"type": "input_video", "video_url": "http://x/y.mp4"},
                    ],
                },
            ]
        }
    )
    assert request.messages == [
        Message("system", (TextPart("Be kind."),)),
        Message("user", (TextPart("Weather?"),)),
        Message(
            "assistant",
            (TextPart("I look."),),
            "hm",
            (ToolCall("c", "weather", "{}"), ToolCall("d", "clock", "{}")),
        ),
        Message("tool", (TextPart("rain"),), tool_call_id="c"),
        Message("tool", (TextPart("9"),), tool_call_id="d"),
        Message(
            "user", (MediaPart("image", "data:image/png;base64,AA"), MediaPart("video", "http://x/y.mp4"))
        ),
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]"),
        ({"input": [5]}, "input[0]"),
        ({"input": None}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "input[0].content",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
            "input[0].content",
        ),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    error = ask(body, status=400)["error"]
    assert error["param"].startswith(param)


FILES = {  # as Codex sends the tools of an MCP server
    "type": "namespace",
    "name": "mcp__files__",
    "description": "Files of the project.",
    "tools": [
        {"type": "function", "name": "read", "description": "Reads.", "strict": False},
        {"type": "custom", "name": "patch"},
        {"type": "function", "name": "list", "parameters": {"type": "object"}},
    ],
}


def test_functions_of_a_namespace_are_tools_with_joined_names() -> None:
    request = request_for({"tools": [TOOL, FILES, FILES | {"name": "sub"}]})
    assert [tool.name for tool in request.tools] == [
        *("weather", "mcp__files__read", "mcp__files__list"),
        *("sub__read", "sub__list"),
    ]
    assert request.tools[1] == Tool("mcp__files__read", "Files of the project.\n\nReads.", {}, strict=False)
    assert request.tools[2] == Tool("mcp__files__list", "", {"type": "object"})


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_namespaces_function_has_the_names_that_the_client_sent(stream: bool) -> None:
    calls = [
        ToolCallStarted(0, "c", "mcp__files__read"),
        ToolCallEnded(0, "{}"),
        ToolCallStarted(1, "d", "weather"),
        ToolCallEnded(1, "{}"),
        Finished("tool_calls", USAGE),
    ]
    body = {"input": "Hi", "tools": [TOOL, FILES], "stream": stream}
    response = Client(server(FakeBackend(calls))).post(PATH, body)
    whole = (
        json.loads(response.text.strip().rpartition("data: ")[2])["response"] if stream else response.json()
    )
    first, second = whole["output"]
    assert (first["name"], first["namespace"]) == ("read", "mcp__files__")
    assert (second["name"], "namespace" in second) == ("weather", False)
    back = request_for({"input": [first, {"type": "function_call_output", "call_id": "c", "output": "x"}]})
    assert back.messages[0].tool_calls == (ToolCall("c", "mcp__files__read", "{}"),)


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([FILES, FILES], "'mcp__files__read' is used twice"),
        ([{"type": "namespace", "tools": []}], "tools[0].name"),
        ([FILES | {"tools": [{"type": "function"}]}], "tools[0].tools[0].name"),
        ([FILES | {"name": f"n{i}", "tools": FILES["tools"] * 300} for i in range(2)], "of at most 1,024"),
    ],
)
def test_bad_namespaces_are_refused(tools: list[Any], words: str) -> None:
    assert words in ask({"tools": tools}, status=400)["error"]["message"]


def test_previous_response_brings_its_conversation_but_not_its_instructions() -> None:
    backend = FakeBackend(CALLS)
    client = Client(server(backend))
    first = client.post(PATH, {"input": "Weather?", "instructions": "Be brief."}).json()
    backend.events = HELLO
    second = client.post(
        PATH,
        {
            "input": [
                {"type": "function_call_output", "call_id": "call_a", "output": "rain"},
                {"type": "function_call_output", "call_id": "call_b", "output": "9"},
            ],
            "previous_response_id": first["id"],
        },
    ).json()
    assert second["previous_response_id"] == first["id"]
    assert backend.requests[1].messages == [
        Message("user", (TextPart("Weather?"),)),
        Message(
            "assistant",
            (TextPart("Let me look."),),
            tool_calls=(ToolCall("call_a", "weather", '{"city":"Oslo"}'), ToolCall("call_b", "time", "{}")),
        ),
        Message("tool", (TextPart("rain"),), tool_call_id="call_a"),
        Message("tool", (TextPart("9"),), tool_call_id="call_b"),
    ]
    third = client.post(
        PATH, {"input": "And?", "previous_response_id": second["id"], "stream": True, "store": False}
    )
    assert third.status_code == 200
    assert [message.role for message in backend.requests[2].messages][-3:] == ["tool", "assistant", "user"]


def test_a_reference_stands_for_an_item_of_a_stored_response() -> None:
    """Vercel's ai refers to what the assistant said and sends its calls."""
    backend = FakeBackend(CALLS)
    client = Client(server(backend))
    first = client.post(PATH, {"input": "Weather?"}).json()
    said, call, other = first["output"]
    backend.events = HELLO
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "item_reference", "id": said["id"]},
        {key: call[key] for key in ("type", "call_id", "name", "arguments")},
        {"type": "item_reference", "id": other["id"]},
        {"type": "function_call_output", "call_id": "call_a", "output": "rain"},
        {"type": "function_call_output", "call_id": "call_b", "output": "9"},
    ]
    second = client.post(PATH, {"input": items}).json()
    assert [message.role for message in backend.requests[1].messages] == ["user", "assistant", "tool", "tool"]
    assert backend.requests[1].messages[1] == Message(
        "assistant",
        (TextPart("Let me look."),),
        tool_calls=(ToolCall("call_a", "weather", '{"city":"Oslo"}'), ToolCall("call_b", "time", "{}")),
    )
    listed = client.get(f"{PATH}/{second['id']}/input_items").json()["data"]
    assert [item["type"] for item in listed][:3] == ["message", "message", "function_call"]
    client.request("DELETE", f"{PATH}/{first['id']}")
    refusal = client.post(PATH, {"input": items})
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (400, "item_not_found")


def test_stored_responses_can_be_read_and_deleted() -> None:
    client = Client(server(FakeBackend()))
    made = client.post(PATH, {"input": "Hi"}).json()
    assert client.get(f"{PATH}/{made['id']}").json() == made
    items = client.get(f"{PATH}/{made['id']}/input_items").json()["data"]
    assert items == [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    assert client.request("DELETE", f"{PATH}/{made['id']}").json()["deleted"]
    assert client.get(f"{PATH}/{made['id']}").status_code == 404


def test_unstored_response_is_forgotten() -> None:
    client = Client(server(FakeBackend()))
    made = client.post(PATH, {"input": "Hi", "store": False}).json()
    assert client.get(f"{PATH}/{made['id']}").status_code == 404


def test_input_tokens_are_counted_without_an_answer() -> None:
    backend = FakeBackend()
    counted = Client(server(backend)).post(f"{PATH}/input_tokens", {"input": "Hello"}).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": 5}
    assert not backend.streams


def stored(name: str, size: int = 0) -> StoredResponse:
    return StoredResponse(name, b"", b"", (Message("user", (TextPart("x" * size),)),))


def test_store_forgets_the_one_not_used_for_longest() -> None:
    store = ResponseStore(max_responses=2, max_bytes=1 << 20)
    store.put("", stored("a"))
    store.put("", stored("b"))
    store.get("", "a")
    store.put("", stored("c"))
    assert store.get("", "b") is None
    assert store.get("", "a") is not None
    assert store.get("another tenant", "a") is None
    assert len(store) == 2


def test_store_keeps_within_its_bytes() -> None:
    store = ResponseStore(max_responses=100, max_bytes=2000)
    for i in range(10):
        store.put("", stored(str(i), 500))
        assert store.num_bytes <= 2000
    store.put("", stored("huge", 5000))
    assert store.get("", "huge") is None
    assert 0 < len(store) < 10
    for i in range(10):
        store.delete("", str(i))
    assert store.num_bytes == 0


def test_store_counts_the_parts_of_a_conversation_though_they_are_empty() -> None:
    store = ResponseStore(max_responses=100, max_bytes=1 << 20)
    message = Message("user", (TextPart(""),) * 10_000)
    store.put("", StoredResponse("a", b"", b"", (message,)))
    assert store.get("", "a") is None


@pytest.mark.parametrize(("max_responses", "max_bytes"), [(3, 1 << 20), (100, 3_000)])
def test_nobody_pushes_out_the_responses_of_others(max_responses: int, max_bytes: int) -> None:
    store = ResponseStore(max_responses, max_bytes)
    store.put("careful", stored("a", 500))
    for i in range(10):
        store.put("greedy", stored(str(i), 500))
    assert store.get("careful", "a") is not None
    assert store.get("greedy", "9") is not None
    assert store.get("greedy", "0") is None
    assert len(store) == 3
