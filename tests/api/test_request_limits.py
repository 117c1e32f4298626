"""Every field of a request has a limit, and the time to refuse a request grows with its size, not faster."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import AsyncMock

import pytest
from fake_backend import USER, Client, FakeBackend, server, settings
from pydantic import BaseModel, ValidationError

from outrider.api import limits
from outrider.api.anthropic.messages_request import CountTokensRequest, MessagesRequest
from outrider.api.body import parse_json
from outrider.api.errors import ApiError, _problems
from outrider.api.middleware import RequestLimits
from outrider.api.openai.chat_request import ChatCompletionRequest
from outrider.api.openai.completions import CompletionRequest
from outrider.api.openai.responses_request import ResponsesRequest
from outrider.chat.schema import MAX_CHECKS, _Check
from patience import PATIENCE_S

CHAT, PLAIN, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
MODELS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    CHAT: (ChatCompletionRequest, {"messages": USER}),
    PLAIN: (CompletionRequest, {"prompt": "Hi"}),
    RESPONSES: (ResponsesRequest, {"input": "Hi"}),
    MESSAGES: (MessagesRequest, {"messages": USER, "max_tokens": 5}),
    f"{MESSAGES}/count_tokens": (CountTokensRequest, {"messages": USER}),
}

# Strings whose length counts towards the prompt (`chat.prompt_limit`), or only towards the body: those with
# data of images, which have limits of their own, and those that are never read.
TEXTS = {"text", "content", "refusal", "arguments", "reasoning_content", "reasoning", "description", "output"}
TEXTS |= {"input", "instructions", "system", "thinking", "title", "context", "prompt", "stop", "[items]"}
DATA = {"url", "image_url", "video_url", "data", "signature", "encrypted_content"}


def nodes(schema: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(name of the field, schema) of each value that a JSON schema describes."""
    if not isinstance(schema, dict):
        return
    yield name, schema
    for inner_name, inner in schema.get("properties", {}).items():
        yield from nodes(inner, inner_name)
    for keyword in ("anyOf", "oneOf", "prefixItems"):
        for inner in schema.get(keyword, ()):
            yield from nodes(inner, name)
    yield from nodes(schema.get("items"), "[items]")
    for inner in schema.get("$defs", {}).values():
        yield from nodes(inner)


def is_bounded(name: str, schema: dict[str, Any]) -> bool:
    match schema.get("type"):
        case "array":
            return "maxItems" in schema
        case "string":
            return bool({"maxLength", "enum", "const"} & schema.keys()) or name in TEXTS | DATA
        case "object":
            return "properties" in schema or "maxProperties" in schema
        case _:
            return True


@pytest.mark.parametrize("path", MODELS)
def test_every_string_list_and_object_has_a_limit(path: str) -> None:
    found = list(nodes(MODELS[path][0].model_json_schema()))
    assert len(found) > 50
    assert [(name, schema) for name, schema in found if not is_bounded(name, schema)] == []


# -- refusals --------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def deep(depth: int) -> Any:
    return json.loads('{"a":' * depth + "1" + "}" * depth)


def allowed(function: Any) -> dict[str, Any]:
    tools = {"mode": "auto", "tools": [{"type": "function", "function": function}]}
    return {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": tools}}


TOO_MUCH: dict[str, tuple[str, dict[str, Any], str]] = {
    "messages": (CHAT, {"messages": USER * 10_001}, "messages"),
    "parts": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 10_001}]},
        "content",
    ),
    "bad messages": (CHAT, {"messages": [0] * 100_000}, "messages[0]"),
    "bad parts": (CHAT, {"messages": [{"role": "user", "content": [0] * 100_000}]}, "messages[0].content[0]"),
    "bad input": (RESPONSES, {"input": [0] * 100_000}, "input"),
    "bad ids": (PLAIN, {"prompt": [1, *["x"] * 100_000]}, "prompt[1]"),
    "bad prompts": (PLAIN, {"prompt": ["", *[0] * 100_000]}, "prompt"),
    "bad metadata": (CHAT, {"metadata": {str(i): 0 for i in range(50_000)}}, "metadata: has 50000 entries"),
    "bad biases": (
        CHAT,
        {"logit_bias": {str(i): "x" for i in range(50_000)}},
        "logit_bias: has 50000 entries",
    ),
    "long role": (CHAT, {"messages": [{"role": "x" * 1_000_000}]}, "messages[0]"),
    "tools": (CHAT, {"tools": [TOOL] * 1025}, "tools"),
    "tool name": (CHAT, {"tools": [{"type": "function", "function": {"name": "f" * 257}}]}, "name"),
    "schema": (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": [0] * 20_000}}}]},
        "has 20001 values",
    ),
    "schema text": (CHAT, {"guided_json": {"title": "x" * (1 << 20)}}, "characters"),
    "template variables": (CHAT, {"chat_template_kwargs": {"x": [0] * 20_000}}, "chat_template_kwargs"),
    "regex": (CHAT, {"guided_regex": "x" * 262_145}, "guided_regex"),
    "choices": (CHAT, {"guided_choice": ["x"] * 1025}, "guided_choice"),
    "long choices": (CHAT, {"guided_choice": ["x" * 1000] * 300}, "characters together"),
    "stop": (CHAT, {"stop": ["x"] * 5}, "stop"),
    "long stop": (CHAT, {"stop": "x" * 4097}, "stop: has 4,097 characters"),
    "stop sequences": (MESSAGES, {"stop_sequences": ["x"] * 65}, "stop_sequences"),
    "long stop sequences": (MESSAGES, {"stop_sequences": ["x" * 100] * 41}, "4,100 characters"),
    "stop in responses": (RESPONSES, {"stop": ["x" * 2000] * 3}, "6,000 characters"),
    "stop of completions": (PLAIN, {"stop": ["x" * 5000]}, "5,000 characters"),
    "stop ids": (CHAT, {"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    "answers": (PLAIN, {"prompt": ["x"] * 10_000, "n": 16}, "160,000 requests"),
    "n": (CHAT, {"n": 129}, "n: "),
    "user": (CHAT, {"user": "x" * 1025}, "user"),
    "metadata value": (CHAT, {"metadata": {"a": "x" * 513}}, "metadata"),
    "depth": (CHAT, {"unknown": deep(129)}, "nested"),
    "depth of arguments": (
        MESSAGES,
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "1", "name": "f", "input": deep(200)}],
                }
            ]
        },
        "nested",
    ),
    "digits": (CHAT, {"seed": 10**65}, "digits"),
    "values": (CHAT, {"unknown": [0] * 300_001}, "300,000"),
    "objects": (CHAT, {"unknown": [{}] * 20_001}, "20,000"),
    "digits of a biased id": (CHAT, {"logit_bias": {"1" * 65: 1.0}}, "logit_bias"),
    "allowed tools": (CHAT, allowed({"name": {}}), "not among the tools"),
    "text as allowed tool": (CHAT, allowed("f"), "not among the tools"),
}


@pytest.mark.parametrize("case", TOO_MUCH)
def test_too_much_is_a_short_400_before_anything_is_prepared(case: str) -> None:
    path, change, words = TOO_MUCH[case]
    backend = FakeBackend()
    response = Client(server(backend)).post(path, MODELS[path][1] | change)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
    assert len(response.content) < 2000
    assert backend.num_prepared == 0


WITHIN: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": (CHAT, {"messages": USER * 10_000}),
    "tools": (CHAT, {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(1024)]}),
    "stops": (CHAT, {"stop": ["x" * 1024] * 4}),
    "stop sequences": (MESSAGES, {"stop_sequences": ["x" * 64] * 64}),
    "token ids": (PLAIN, {"prompt": [1] * 250_000}),
    "depth": (CHAT, {"chat_template_kwargs": deep(126)}),
    "digits": (CHAT, {"seed": 2**64 - 1}),
}


@pytest.mark.parametrize("case", WITHIN)
def test_requests_at_their_limits_are_served(case: str) -> None:
    path, change = WITHIN[case]
    response = Client(server(FakeBackend())).post(path, MODELS[path][1] | change)
    assert response.status_code == 200, response.text[:500]


@pytest.mark.parametrize("depth", [limits.JSON_DEPTH.most, limits.JSON_DEPTH.most + 1])
@pytest.mark.parametrize("pair", ["[]", "{}"])
def test_depth_is_counted_exactly(depth: int, pair: str) -> None:
    opening = "[" if pair == "[]" else '{"a":'
    body = (opening * (depth - 1) + pair + pair[1] * (depth - 1)).encode()
    if depth > limits.JSON_DEPTH.most:
        with pytest.raises(ApiError, match="nested"):
            parse_json(body)
    else:
        parse_json(body)


# -- time ------------------------------------------------------------------------------------------------


def wrong_everywhere(path: str, count: int) -> dict[str, Any]:
    """A body in which every field of the model is a list, and then a dict, of `count` wrong values."""
    model = MODELS[path][0]
    names = [field.alias or name for name, field in model.model_fields.items()]
    wrong: list[Any] = [[[]] * count, {str(i): [] for i in range(count)}]
    return {name: wrong[i % 2] for i, name in enumerate(names)}


@pytest.mark.parametrize("path", MODELS)
def test_number_of_errors_does_not_grow_with_the_body(path: str) -> None:
    def count_errors(count: int) -> int:
        with pytest.raises(ValidationError) as caught:
            MODELS[path][0].model_validate(wrong_everywhere(path, count))
        return caught.value.error_count()

    assert count_errors(20) == count_errors(2000) < 200


def cpu_s(work: Callable[[], object]) -> float:
    """The least of three runs: CPU time of this thread, without garbage collections.

    A busy machine changes it little, and so do the objects of other tests.
    """
    times = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            started_s = time.thread_time()
            work()
            times.append(time.thread_time() - started_s)
    finally:
        gc.enable()
    return min(times)


def tools_body(count: int) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(count)]
    allowed = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(count)]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": allowed}}
    return {"messages": USER, "tools": tools, "tool_choice": choice}


def chosen(count: int) -> None:
    from outrider.api.openai.chat_request import chat_request

    chat_request(ChatCompletionRequest.model_validate(tools_body(count)), None)


def problems(count: int) -> None:
    body = {"messages": [0] * count}
    _problems([{"loc": ("body", "messages", i), "msg": "wrong"} for i in range(count)], body)


@pytest.mark.parametrize(
    ("work", "count"),
    [(problems, 500), (chosen, 120), (lambda n: parse_json(b"[" + b"[[0]]," * n + b"0]"), 5000)],
    ids=["schema errors", "allowed tools", "JSON"],
)
def test_time_grows_with_the_size_and_not_with_its_square(work: Callable[[int], None], count: int) -> None:
    """Eight times the size takes eight times as long; were it quadratic, 64 times."""
    assert cpu_s(lambda: work(8 * count)) < 30 * cpu_s(lambda: work(count)) + 0.01


def test_schema_of_a_tool_that_refers_to_itself_is_checked_in_bounded_time() -> None:
    """Two references to the root: without a bound, each level of depth doubles the work."""
    schema = {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}
    check = _Check(schema)
    assert check.problem({}, schema, "arguments", 0) is None
    assert check._num_checks < 2 * MAX_CHECKS + 1000


@pytest.mark.parametrize("text", ["a,b,c\n" * 100_000, '{"a\\": [1]}, \\' * 60_000])
def test_what_a_prompt_holds_does_not_count_as_json(text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}]}
    assert parse_json(json.dumps(body).encode()) == body


@pytest.mark.parametrize("value", ["[]", '""', "{}", '{"a\\\\":"{"}', '"\\""'])
def test_values_outside_of_texts_count(value: str) -> None:
    with pytest.raises(ApiError, match="the limit is"):
        parse_json(f"[{','.join([value] * 310_000)}]".encode())


def test_a_client_may_not_rest_after_the_first_part_of_a_body() -> None:
    messages = [
        {"type": "http.request", "body": b"x" * (16 << 20), "more_body": True}
    ]  # of 512 s at 32 KiB/s

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.get_running_loop().create_future()

    async def read(scope: Any, receive: Any, send: Any) -> None:
        while True:
            await receive()

    async def run() -> None:
        limited = RequestLimits(read, settings(body_timeout_s=0.05))
        scope = {"type": "http", "path": "/", "query_string": b"", "headers": []}
        async with asyncio.timeout(PATIENCE_S):
            await limited(scope, receive, AsyncMock())

    with pytest.raises(ApiError, match="16,777,216 bytes came") as refused:
        asyncio.run(run())
    assert refused.value.status_code == 408
