"""The golden requests for the HTTP API, and how their answers are read.

Every request is sent twice: for the whole answer and for a stream. Both answers are brought into one form,
which must be equal to the record. The form has no ids, times or counts of drafts, which differ between runs.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
from golden_requests import CITY_SCHEMA, Vocabulary, disc

from image_files import data_url, encoded

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TIMEOUT_S = 300
NUM_CLIENTS = 4

Json = dict[str, Any]


@dataclass(frozen=True)
class HttpRequest:
    path: str
    body: Json
    follow_up: Json = field(
        default_factory=dict
    )  # sent with the id of the first response, to /v1/responses only


# -- the requests ------------------------------------------------------------------------------------------

GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.9, "seed": 5}
HI = [{"role": "user", "content": "Tell me a story."}]
TOOL_TURN = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]
CLAUDE_TOOL_TURN = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}}],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "rain"}]},
]
CHAT_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY_SCHEMA}}]
RESPONSE_TOOLS = [{"type": "function", "name": "weather", "parameters": CITY_SCHEMA}]
CLAUDE_TOOLS = [{"name": "weather", "input_schema": CITY_SCHEMA}]
WEATHER_FORM = {"type": "json_schema", "json_schema": {"name": "weather", "schema": CITY_SCHEMA}}


def text_requests(num_tokens: int, vocabulary: Vocabulary, **settings: Any) -> dict[str, HttpRequest]:
    """Requests that every model can answer. `settings` go into every request but bare prompts."""
    chat = {"messages": HI, "max_tokens": num_tokens, **settings}
    response = {"input": "Tell me a story.", "max_output_tokens": num_tokens, **settings}
    message = {"messages": HI, "max_tokens": num_tokens, **settings}
    form_tokens = {"max_tokens": 6 * num_tokens}
    system = {"role": "system", "content": "Answer briefly."}
    bias = {str(vocabulary.frequent_ids[0]): 2.5, str(vocabulary.frequent_ids[1]): -100}
    return {
        "chat: greedy": HttpRequest(CHAT, {**chat, **GREEDY, "draft_depth": 3, "ignore_eos": True}),
        "chat: two seeds": HttpRequest(CHAT, {**chat, **SAMPLED, "n": 2}),
        "chat: filters": HttpRequest(
            CHAT, {**chat, **SAMPLED, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "draft_depth": 1}
        ),
        "chat: penalties": HttpRequest(
            CHAT,
            {**chat, **SAMPLED, "presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        ),
        "chat: logit bias": HttpRequest(CHAT, {**chat, **SAMPLED, "logit_bias": bias}),
        "chat: stop strings": HttpRequest(
            CHAT, {**chat, **SAMPLED, "stop": list(vocabulary.stop), "draft_depth": 8, "ignore_eos": True}
        ),
        "chat: logprobs": HttpRequest(
            CHAT, {**chat, **GREEDY, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
        ),
        "chat: system message": HttpRequest(
            CHAT, {**chat, **GREEDY, "messages": [system, *HI], "draft_depth": 0}
        ),
        "chat: JSON schema": HttpRequest(
            CHAT, {**chat, **SAMPLED, "seed": 2, **form_tokens, "response_format": WEATHER_FORM}
        ),
        "chat: regex": HttpRequest(CHAT, {**chat, **SAMPLED, "guided_regex": "(yes|no), [a-z]{3,9}"}),
        "chat: forced tool": HttpRequest(
            CHAT, {**chat, **SAMPLED, **form_tokens, "tools": CHAT_TOOLS, "tool_choice": "required"}
        ),
        "chat: optional tool": HttpRequest(CHAT, {**chat, **GREEDY, "tools": CHAT_TOOLS, "draft_depth": 2}),
        "chat: after a tool result": HttpRequest(
            CHAT, {**chat, **GREEDY, "messages": TOOL_TURN, "tools": CHAT_TOOLS}
        ),
        "chat: prediction": HttpRequest(
            CHAT,
            {**chat, **GREEDY, "prediction": {"type": "content", "content": "Once upon a time, a river"}},
        ),
        "completions: greedy": HttpRequest(
            COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": num_tokens, **GREEDY, "echo": True}
        ),
        "completions: several prompts": HttpRequest(
            COMPLETIONS,
            {"prompt": ["One two three", "abcabcabc"], "max_tokens": num_tokens, **SAMPLED, "n": 2},
        ),
        "completions: token ids and logprobs": HttpRequest(
            COMPLETIONS, {"prompt": [40, 41, 42, 40, 41], "max_tokens": 6, **SAMPLED, "logprobs": 2}
        ),
        "responses: greedy": HttpRequest(
            RESPONSES, {**response, **GREEDY, "instructions": "Answer briefly.", "ignore_eos": True}
        ),
        "responses: sampled": HttpRequest(RESPONSES, {**response, **SAMPLED, "top_p": 0.9}),
        "responses: two turns": HttpRequest(
            RESPONSES, {**response, **GREEDY}, {**response, **GREEDY, "input": "And then?"}
        ),
        "responses: JSON schema": HttpRequest(
            RESPONSES,
            {
                **response,
                **SAMPLED,
                "max_output_tokens": 6 * num_tokens,
                "text": {"format": {"type": "json_schema", "name": "weather", "schema": CITY_SCHEMA}},
            },
        ),
        "responses: forced tool": HttpRequest(
            RESPONSES,
            {
                **response,
                **SAMPLED,
                "max_output_tokens": 6 * num_tokens,
                "tools": RESPONSE_TOOLS,
                "tool_choice": {"type": "function", "name": "weather"},
            },
        ),
        "messages: greedy": HttpRequest(
            MESSAGES, {**message, **GREEDY, "system": "Answer briefly.", "ignore_eos": True}
        ),
        "messages: sampled": HttpRequest(MESSAGES, {**message, **SAMPLED, "top_k": 30}),
        "messages: stop sequence": HttpRequest(
            MESSAGES, {**message, **SAMPLED, "stop_sequences": list(vocabulary.stop), "ignore_eos": True}
        ),
        "messages: prefilled answer": HttpRequest(
            MESSAGES, {**message, **GREEDY, "messages": [*HI, {"role": "assistant", "content": "Once"}]}
        ),
        "messages: forced tool": HttpRequest(
            MESSAGES,
            {**message, **SAMPLED, **form_tokens, "tools": CLAUDE_TOOLS, "tool_choice": {"type": "any"}},
        ),
        "messages: after a tool result": HttpRequest(
            MESSAGES, {**message, **GREEDY, "messages": CLAUDE_TOOL_TURN, "tools": CLAUDE_TOOLS}
        ),
    }


FEW = (
    *("chat: two seeds", "chat: logprobs", "chat: forced tool", "completions: several prompts"),
    *("responses: two turns", "messages: stop sequence"),
)


def few_requests(num_tokens: int, vocabulary: Vocabulary) -> dict[str, HttpRequest]:
    """Some of the requests, for a model that takes its time."""
    requests = text_requests(num_tokens, vocabulary)
    return {name: requests[name] for name in FEW}


def reasoning_requests(num_tokens: int, think_end_id: int) -> dict[str, HttpRequest]:
    """Requests for a model that thinks. A bias makes the end of the reasoning likely."""
    ending = {**SAMPLED, "logit_bias": {str(think_end_id): 4.0}, "enable_thinking": True}
    chat = {"messages": HI, "max_tokens": num_tokens, "ignore_eos": True, **ending}
    form_tokens = {"max_tokens": 3 * num_tokens, "ignore_eos": False}
    response = {"input": "Why?", "max_output_tokens": num_tokens, "ignore_eos": True, **ending}
    return {
        "chat: reasoning": HttpRequest(CHAT, {**chat, "draft_depth": 3}),
        "chat: reasoning without drafts": HttpRequest(CHAT, {**chat, "draft_depth": 0}),
        "chat: reasoning, then JSON schema": HttpRequest(
            CHAT, {**chat, **form_tokens, "seed": 6, "response_format": WEATHER_FORM}
        ),
        "chat: reasoning, then forced tool": HttpRequest(
            CHAT, {**chat, **form_tokens, "tools": CHAT_TOOLS, "tool_choice": "required", "draft_depth": 2}
        ),
        "chat: reasoning off": HttpRequest(CHAT, {**chat, "enable_thinking": False}),
        "responses: reasoning": HttpRequest(RESPONSES, response),
        "messages: thinking": HttpRequest(MESSAGES, chat),
    }


def picture_requests(num_tokens: int, size: int) -> dict[str, HttpRequest]:
    red, blue = (data_url(encoded(disc(colour, size))) for colour in ((220, 20, 20), (20, 40, 220)))
    question = {"type": "text", "text": "What is in the picture?"}
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in (red, blue)]
    source = {"type": "base64", "media_type": "image/png", "data": red.partition(",")[2]}
    greedy = {"max_tokens": num_tokens, **GREEDY}

    def ask(*content: Json) -> Json:
        return {"messages": [{"role": "user", "content": list(content)}]}

    response_input = [
        {"type": "input_image", "image_url": red},
        {"type": "input_text", "text": question["text"]},
    ]
    return {
        "chat: picture": HttpRequest(CHAT, {**ask(shown[0], question), **greedy}),
        "chat: two pictures": HttpRequest(CHAT, {**ask(shown[1], question, shown[0]), **greedy, **SAMPLED}),
        "chat: no picture": HttpRequest(CHAT, {**ask(question), **greedy}),
        "responses: picture": HttpRequest(
            RESPONSES,
            {
                "input": [{"role": "user", "content": response_input}],
                "max_output_tokens": num_tokens,
                **GREEDY,
            },
        ),
        "messages: picture": HttpRequest(
            MESSAGES, {**ask({"type": "image", "source": source}, question), **greedy}
        ),
    }


# -- sending -----------------------------------------------------------------------------------------------


def answers(url: str, requests: dict[str, HttpRequest], is_stream: bool) -> dict[str, Json]:
    """The answers by name. Several requests are under way at any time."""
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client, ThreadPoolExecutor(NUM_CLIENTS) as threads:
        found = threads.map(lambda request: _answer(client, request, is_stream), requests.values())
        return dict(zip(requests, found, strict=True))


def _answer(client: httpx.Client, request: HttpRequest, is_stream: bool) -> Json:
    first = _post(client, request.path, request.body, is_stream)
    found = READERS[request.path](first)
    if request.follow_up:
        body = {**request.follow_up, "previous_response_id": first["id"]}
        found["follow_up"] = READERS[request.path](_post(client, request.path, body, is_stream))
    return found


def _post(client: httpx.Client, path: str, body: Json, is_stream: bool) -> Json:
    """The whole answer. A stream is put together to the form that the whole answer has."""
    if not is_stream:
        response = client.post(path, json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())
    extra = {"stream_options": {"include_usage": True}} if path in (CHAT, COMPLETIONS) else {}
    response = client.post(path, json={**body, **extra, "stream": True})
    assert response.status_code == 200, response.text
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return JOINERS[path]([json.loads(one) for one in data if one != "[DONE]"])


# -- chat completions and completions ----------------------------------------------------------------------


def _read_choices(answer: Json) -> Json:
    usage = answer["usage"]
    found: Json = {"num_tokens": [usage["prompt_tokens"], usage["completion_tokens"]]}
    found["choices"] = [_read_choice(one) for one in sorted(answer["choices"], key=lambda one: one["index"])]
    return found


def _read_choice(choice: Json) -> Json:
    message = choice.get("message", choice)
    found = {
        "text": message.get("content") or message.get("text") or "",
        "finish_reason": choice["finish_reason"],
    }
    if message.get("reasoning_content"):
        found["reasoning"] = message["reasoning_content"]
    if message.get("tool_calls"):
        functions = [call["function"] for call in message["tool_calls"]]
        found["tool_calls"] = [[function["name"], function["arguments"]] for function in functions]
    if choice.get("logprobs"):
        found["logprobs"] = _read_logprobs(choice["logprobs"])
    return found


def _read_logprobs(logprobs: Json) -> list[Any]:
    """[token, logprob, alternatives] for each token."""
    if "content" in logprobs:
        return [
            [one["token"], one["logprob"], [[top["token"], top["logprob"]] for top in one["top_logprobs"]]]
            for one in logprobs["content"]
        ]
    columns = (logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"])
    return [
        [token, value, sorted(map(list, top.items()))] for token, value, top in zip(*columns, strict=True)
    ]


def _join_chat(chunks: list[Json]) -> Json:
    choices: dict[int, Json] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            choice = choices.setdefault(
                piece["index"],
                {"index": piece["index"], "message": {"content": None}, "logprobs": {"content": []}},
            )
            _add_delta(choice["message"], piece["delta"])
            choice["finish_reason"] = piece["finish_reason"]
            choice["logprobs"]["content"] += (piece.get("logprobs") or {}).get("content") or []
    for choice in choices.values():
        if not choice["logprobs"]["content"]:
            del choice["logprobs"]
    return {"choices": list(choices.values()), "usage": chunks[-1]["usage"]}


def _add_delta(message: Json, delta: Json) -> None:
    for name in ("content", "reasoning_content"):
        if delta.get(name):
            message[name] = (message.get(name) or "") + delta[name]
    for call in delta.get("tool_calls") or ():
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append({"function": {"name": call["function"]["name"], "arguments": ""}})
        calls[call["index"]]["function"]["arguments"] += call["function"].get("arguments") or ""


def _join_completions(chunks: list[Json]) -> Json:
    choices: dict[int, Json] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], {"index": piece["index"], "text": "", "logprobs": {}})
            choice["text"] += piece["text"]
            choice["finish_reason"] = piece["finish_reason"]
            for name, values in (piece.get("logprobs") or {}).items():
                choice["logprobs"].setdefault(name, []).extend(values)
    return {"choices": list(choices.values()), "usage": chunks[-1]["usage"]}


# -- responses ---------------------------------------------------------------------------------------------


def _read_response(answer: Json) -> Json:
    usage = answer["usage"]
    return {
        "num_tokens": [usage["input_tokens"], usage["output_tokens"]],
        "items": [_read_item(item) for item in answer["output"]],
        "status": answer["status"],
    }


def _read_item(item: Json) -> list[Any]:
    if item["type"] == "function_call":
        return [item["type"], item["name"], item["arguments"]]
    return [item["type"], "".join(part["text"] for part in item["content"])]


def _join_response(events: list[Json]) -> Json:
    """The last event's response, with the text of the deltas in the place of its own text."""
    response = events[-1]["response"]
    texts = ["" for _ in response["output"]]
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] += event["delta"]
    for item, text in zip(response["output"], texts, strict=True):
        if item["type"] == "function_call":
            item["arguments"] = text
        else:
            item["content"] = [{"text": text}]
    return dict(response)


# -- messages ----------------------------------------------------------------------------------------------


def _read_message(answer: Json) -> Json:
    usage = answer["usage"]
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return {
        "num_tokens": [sum(usage.get(part) or 0 for part in parts), usage["output_tokens"]],
        "blocks": [_read_block(block) for block in answer["content"]],
        "stop_reason": answer["stop_reason"],
        "stop_sequence": answer["stop_sequence"],
    }


def _read_block(block: Json) -> list[Any]:
    if block["type"] == "tool_use":
        return [block["type"], block["name"], block["input"]]
    return [block["type"], block[block["type"]]]


def _join_message(events: list[Json]) -> Json:
    message: Json = {}
    written: dict[int, str] = {}
    for event in events:
        if event["type"] == "message_start":
            message = dict(event["message"])
        elif event["type"] == "content_block_start":
            message["content"].append(dict(event["content_block"]))
            written[event["index"]] = ""
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            written[event["index"]] += next(
                (delta[name] for name in ("text", "thinking", "partial_json") if name in delta), ""
            )
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] = {**message["usage"], **event["usage"]}
    for index, block in enumerate(message["content"]):
        if block["type"] == "tool_use":
            block["input"] = json.loads(written[index] or "{}")
        else:
            block[block["type"]] = written[index]
    return message


READERS = {
    CHAT: _read_choices,
    COMPLETIONS: _read_choices,
    RESPONSES: _read_response,
    MESSAGES: _read_message,
}
JOINERS = {
    CHAT: _join_chat,
    COMPLETIONS: _join_completions,
    RESPONSES: _join_response,
    MESSAGES: _join_message,
}
