"""Ollama's generate: a prompt with the chat template, or without one (raw); and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from fake_backend import CUT, HELLO, THOUGHT, FakeBackend
from shared_server import shared_server

from outrider.answer_form import Grammar
from outrider.chat.conversation import MediaPart, Message, TextPart
from outrider.chat.events import ChatEvent

PATH = "/api/generate"


def ask(
    body: dict[str, Any], events: Sequence[ChatEvent] = HELLO, status: int = 200
) -> tuple[Any, FakeBackend]:
    """The answer, and the backend that gave it."""
    client, backend = shared_server(events)
    response = client.post(PATH, {"model": "tiny", "prompt": "Hi", "stream": False} | body)
    assert response.status_code == status, response.text
    return response.json(), backend


def test_whole_answer() -> None:
    answer, _ = ask({}, THOUGHT)
    assert answer.pop("total_duration") > 0
    assert answer == {
        "model": "tiny",
        "created_at": "2023-11-14T22:13:20Z",
        "response": "Hello wörld",
        "thinking": "Hmm.",
        "done": True,
        "done_reason": "stop",
        "prompt_eval_count": 7,
        "eval_count": 5,
    }


def test_prompt_system_and_images_are_messages() -> None:
    body = {
        "system": "Be brief",
        "images": ["aGk="],
        "think": False,
        "format": "json",
        "options": {"num_predict": 3},
    }
    _, backend = ask(body)
    (chat,) = backend.requests
    assert chat.messages == [
        Message("system", (TextPart("Be brief"),)),
        Message("user", (MediaPart("image", "data:;base64,aGk="), TextPart("Hi"))),
    ]
    assert chat.grammar == Grammar("json_object")
    assert chat.params.max_tokens == 3
    assert chat.params.thinking_token_budget == 0
    assert chat.template_kwargs == {"enable_thinking": False}
    assert not chat.tools


def test_a_raw_prompt_is_used_as_it_is() -> None:
    body = {"raw": True, "format": {"type": "object"}, "options": {"seed": 3}, "logprobs": True}
    answer, backend = ask(body, CUT)
    assert answer["response"] == "Hel"
    ((prompt, params),) = backend.completions
    assert prompt == "Hi"
    assert (params.seed, params.logprobs) == (3, 0)
    assert params.grammar == Grammar("json_schema", '{"type": "object"}')
    assert not backend.requests


def test_a_request_without_a_prompt_loads_the_model() -> None:
    for body in ({"prompt": ""}, {"prompt": None}, {"prompt": "", "keep_alive": -1, "stream": True}):
        answer, backend = ask(body)
        assert (answer["response"], answer["done"], answer["done_reason"]) == ("", True, "load")
        assert not backend.streams
    answer, _ = ask({"prompt": "", "keep_alive": 0}, status=409)
    assert "is pinned" in answer["error"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"suffix": "}"}, "suffix: not supported: models continue prompts"),
        ({"template": "{{ .Prompt }}"}, "template: not supported: the model's own chat template"),
        ({"context": [1, 2]}, "context: deprecated in Ollama"),
        ({"raw": True, "system": "s"}, "raw mode does not support template, system, or context"),
        ({"raw": True, "images": ["aGk="]}, "images: not supported with raw"),
        ({"raw": True, "think": True}, "think: not supported with raw"),
        ({"width": 512}, "width: not supported: this server generates text"),
        ({"steps": 4}, "steps: not supported"),
        ({"_debug_render_only": True}, "_debug_render_only"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
    ],
)
def test_what_cannot_be_honoured_is_refused(body: dict[str, Any], words: str) -> None:
    answer, backend = ask(body, status=400)
    assert words in answer["error"]
    assert not backend.streams


@pytest.mark.parametrize(
    "body",
    [
        {"suffix": "", "template": "", "context": [], "system": "", "images": [], "raw": False},
        {"suffix": None, "template": None, "context": None, "format": "", "think": None},
        {"raw": True, "think": False},
    ],
)
def test_fields_without_a_value_are_accepted(body: dict[str, Any]) -> None:
    ask(body)
