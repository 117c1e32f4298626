"""Well-formed requests of all four APIs, made from a seed, and what a client keeps of an answer.

The answer to a request is the same text, calls and end whether it is streamed or not, whatever drafts it gets
and whoever else is served: `Answer` holds exactly these parts, so that two answers can be compared.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from image_files import data_url, encoded, noise

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
APIS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)

WORDS = (
    "a",
    "small",
    "river",
    "runs",
    "past",
    "the",
    "old",
    "mill",
    "and",
    "nobody",
    "counts",
    "its",
    "stones",
)
PICTURES = [data_url(encoded(noise(24 + 8 * seed, 24, seed))) for seed in range(6)]
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["bird", "fish", "stone"]},
        "wet": {"type": "boolean"},
        "legs": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["kind", "wet", "legs"],
    "additionalProperties": False,
}
PARAMETERS = {
    "type": "object",
    "properties": {"place": {"enum": ["here", "there"]}, "deep": {"type": "boolean"}},
    "required": ["place", "deep"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class ApiRequest:
    path: str
    body: dict[str, Any]

    @property
    def is_streamed(self) -> bool:
        return bool(self.body.get("stream"))

    def plain(self) -> ApiRequest:
        """The same request without drafts and without a stream."""
        return replace(self, body={**self.body, "stream": False, "draft_depth": 0})


@dataclass
class Answer:
    """What the model said, by choice."""

    text: dict[int, str] = field(default_factory=dict)
    calls: dict[int, list[list[str]]] = field(default_factory=dict)  # [name, arguments as JSON]
    ends: dict[int, str] = field(default_factory=dict)

    def add_text(self, choice: int, text: str) -> None:
        self.text[choice] = self.text.get(choice, "") + text

    def add_call(self, choice: int, name: str, arguments: str) -> None:
        self.calls.setdefault(choice, []).append([name, arguments])


def new_request(rng: random.Random) -> ApiRequest:
    """One request as some user would send it: chat, JSON, tools, pictures, long prompts, several answers."""
    path = rng.choice((CHAT, CHAT, *APIS))
    body: dict[str, Any] = {"stream": rng.random() < 0.7, "temperature": rng.choice((0, 0, 0.9))}
    body["seed"] = rng.randrange(1 << 30)
    body["ignore_eos"] = rng.random() < 0.5
    if rng.random() < 0.7:
        body["draft_depth"] = rng.randrange(5)
    if rng.random() < 0.2:
        body["top_p"] = 0.8
    body["max_output_tokens" if path == RESPONSES else "max_tokens"] = rng.randrange(4, 64)
    if path == MESSAGES:
        body["model"] = "model"
    _add_prompt(path, body, rng)
    kind = rng.random()
    if kind < 0.2:
        _add_schema(path, body)
    elif kind < 0.4 and path != COMPLETIONS:
        _add_tool(path, body)
    elif kind < 0.5 and path in (CHAT, COMPLETIONS):
        body["n"] = 2
    elif kind < 0.6 and path in (CHAT, COMPLETIONS):
        body["stop"] = [rng.choice("eaon"), "zz"]
    return ApiRequest(path, body)


def next_turn(request: ApiRequest, answer: Answer, rng: random.Random) -> ApiRequest | None:
    """An agent goes on: the conversation so far, the answer and a new question. None for other requests."""
    if request.path not in (CHAT, MESSAGES) or "n" in request.body or not answer.text.get(0):
        return None
    said = [{"role": "assistant", "content": answer.text[0]}, {"role": "user", "content": _text(rng, 6)}]
    return replace(request, body={**request.body, "messages": [*request.body["messages"], *said]})


def _add_prompt(path: str, body: dict[str, Any], rng: random.Random) -> None:
    text = _text(rng, rng.choice((3, 10, 10, 30, 90)))
    if path == COMPLETIONS:
        body["prompt"] = text
        return
    has_picture = rng.random() < 0.25
    picture = rng.choice(PICTURES)
    if path == MESSAGES:
        source = {"type": "base64", "media_type": "image/png", "data": picture.partition(",")[2]}
        parts = [{"type": "image", "source": source}, {"type": "text", "text": text}]
    elif path == RESPONSES:
        parts = [{"type": "input_image", "image_url": picture}, {"type": "input_text", "text": text}]
    else:
        parts = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": text}]
    message = {"role": "user", "content": parts if has_picture else text}
    body["input" if path == RESPONSES else "messages"] = [message]


def _add_schema(path: str, body: dict[str, Any]) -> None:
    if path == CHAT:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    elif path == RESPONSES:
        body["text"] = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}}
    elif path == MESSAGES:
        body["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    else:
        body["structured_outputs"] = {"json": SCHEMA}
    _give_room(path, body)


def _add_tool(path: str, body: dict[str, Any]) -> None:
    name, about = "look", "Looks somewhere."
    if path == CHAT:
        body["tools"] = [
            {"type": "function", "function": {"name": name, "description": about, "parameters": PARAMETERS}}
        ]
        body["tool_choice"] = "required"
    elif path == RESPONSES:
        body["tools"] = [{"type": "function", "name": name, "description": about, "parameters": PARAMETERS}]
        body["tool_choice"] = "required"
    else:
        body["tools"] = [{"name": name, "description": about, "input_schema": PARAMETERS}]
        body["tool_choice"] = {"type": "any"}
    _give_room(path, body)


def _give_room(path: str, body: dict[str, Any]) -> None:
    """Enough tokens for a whole object, of a tokenizer with single characters."""
    body["max_output_tokens" if path == RESPONSES else "max_tokens"] = 160
    body["ignore_eos"] = False


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


# -- reading answers ---------------------------------------------------------------------------------------


def read_whole(path: str, body: dict[str, Any]) -> Answer:
    """The answer in the JSON of a request without a stream."""
    answer = Answer()
    if path == MESSAGES:
        _read_blocks(answer, body["content"])
        answer.ends[0] = body["stop_reason"]
    elif path == RESPONSES:
        _read_items(answer, body["output"])
        answer.ends[0] = body["status"]
    else:
        for choice in body["choices"]:
            index = choice["index"]
            message = choice.get("message") or {"content": choice.get("text")}
            answer.add_text(index, message.get("content") or "")
            for call in message.get("tool_calls") or ():
                answer.add_call(index, call["function"]["name"], call["function"]["arguments"])
            answer.ends[index] = choice["finish_reason"]
    return answer


def read_events(path: str, events: Iterable[dict[str, Any]]) -> Answer:
    """The answer in the events of a stream."""
    answer = Answer()
    for event in events:
        if path == MESSAGES:
            _read_anthropic(answer, event)
        elif path == RESPONSES:
            if event["type"] in ("response.completed", "response.incomplete"):
                _read_items(answer, event["response"]["output"])
                answer.ends[0] = event["response"]["status"]
        else:
            _read_openai(answer, event)
    return answer


def _read_openai(answer: Answer, event: dict[str, Any]) -> None:
    for choice in event.get("choices") or ():
        index, delta = choice["index"], choice.get("delta") or {}
        answer.add_text(index, delta.get("content") or choice.get("text") or "")
        for call in delta.get("tool_calls") or ():
            calls = answer.calls.setdefault(index, [])
            while len(calls) <= call["index"]:
                calls.append(["", ""])
            calls[call["index"]][0] += call["function"].get("name") or ""
            calls[call["index"]][1] += call["function"].get("arguments") or ""
        if choice.get("finish_reason"):
            answer.ends[index] = choice["finish_reason"]


def _read_anthropic(answer: Answer, event: dict[str, Any]) -> None:
    if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
        answer.add_call(0, event["content_block"]["name"], "")
    elif event["type"] == "content_block_delta":
        delta = event["delta"]
        if delta["type"] == "text_delta":
            answer.add_text(0, delta["text"])
        elif delta["type"] == "input_json_delta":
            answer.calls[0][-1][1] += delta["partial_json"]
    elif event["type"] == "message_delta" and event["delta"].get("stop_reason"):
        answer.ends[0] = event["delta"]["stop_reason"]


def _read_blocks(answer: Answer, blocks: list[dict[str, Any]]) -> None:
    for block in blocks:
        if block["type"] == "text":
            answer.add_text(0, block["text"])
        elif block["type"] == "tool_use":
            answer.add_call(0, block["name"], json.dumps(block["input"]))


def _read_items(answer: Answer, items: list[dict[str, Any]]) -> None:
    for item in items:
        if item["type"] == "message":
            for part in item["content"]:
                answer.add_text(0, part.get("text") or "")
        elif item["type"] == "function_call":
            answer.add_call(0, item["name"], item["arguments"])


def same(one: Answer, other: Answer) -> bool:
    """Arguments are compared as JSON: a stream has the model's own spaces in them."""
    return (
        {i: text for i, text in one.text.items() if text} == {i: t for i, t in other.text.items() if t}
        and one.ends == other.ends
        and _parsed(one.calls) == _parsed(other.calls)
    )


def _parsed(calls: dict[int, list[list[str]]]) -> dict[int, list[tuple[str, Any]]]:
    return {i: [(name, _arguments(text)) for name, text in made] for i, made in calls.items() if made}


def _arguments(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except json.JSONDecodeError:  # the answer ended at its last token
        return text
