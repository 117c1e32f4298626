"""Plain completions: all four forms of prompt, echo, and the legacy logprobs."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from fake_backend import HELLO, USAGE, Client, FakeBackend, server

from outrider.answer_form import Grammar
from outrider.chat.events import Finished, Logprobs, PromptLogprobs, TextDelta
from outrider.plan import TokenLogprobs

PATH = "/v1/completions"


def ask(body: dict[str, Any], backend: FakeBackend | None = None, status: int = 200) -> Any:
    response = Client(server(backend or FakeBackend())).post(PATH, {"prompt": "p"} | body)
    assert response.status_code == status, response.text
    return response.json()


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("abc", ["abc"]),
        (["abc", "d"], ["abc", "d"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_forms_of_prompts(prompt: Any, prompts: list[Any]) -> None:
    backend = FakeBackend()
    ask({"prompt": prompt}, backend)
    assert [given for given, _ in backend.completions] == prompts


@pytest.mark.parametrize(
    "prompt", [None, [], 5, {"a": 1}, [1.5], ["a", 1], [[1], "a"], [[True]], [None], [["a"]]]
)
def test_other_forms_are_refused(prompt: Any) -> None:
    assert ask({"prompt": prompt}, status=400)["error"]["param"].startswith("prompt")


def test_parameters_reach_the_engine() -> None:
    backend = FakeBackend()
    ask({"temperature": 0.5, "guided_regex": "a", "n": 2, "seed": 3, "best_of": 2}, backend)
    params = [params for _, params in backend.completions]
    assert [p.seed for p in params] == [3, 4]
    assert {p.max_tokens for p in params} == {16}
    assert params[0].grammar == Grammar("regex", "a")
    assert params[0].temperature == 0.5


def test_choices_are_numbered_by_prompt_then_answer() -> None:
    backend = FakeBackend(answer=lambda call: (TextDelta(f"{call[0]}!"), Finished("stop", USAGE)))
    answer = ask({"prompt": ["a", "b"], "n": 2}, backend)
    assert [choice["text"] for choice in answer["choices"]] == ["a!", "a!", "b!", "b!"]
    assert answer["usage"]["prompt_tokens"] == 14  # each prompt once
    assert answer["usage"]["completion_tokens"] == 20


def test_echo_repeats_text_and_decodes_ids() -> None:
    assert ask({"prompt": "Say: ", "echo": True})["choices"][0]["text"] == "Say: Hello wörld"
    assert ask({"prompt": [0, 1], "echo": True})["choices"][0]["text"] == "abHello wörld"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "truncate_prompt_tokens": 5}, "echo"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": list("abcde")}, "stop"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    assert ask(body, status=400)["error"]["param"].startswith(param)


TOKENS = (TokenLogprobs(7, -0.5, ((1, -0.1),)), TokenLogprobs(26, -1.0, ((26, -1.0),)))
WITH_LOGPROBS = (TextDelta("h"), Logprobs(TOKENS[:1]), Logprobs(TOKENS[1:]), Finished("length", USAGE))


def test_legacy_logprobs() -> None:
    logprobs = ask({"logprobs": 1}, FakeBackend(WITH_LOGPROBS))["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["h", "\\xc3"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"b": -0.1, "h": -0.5}, {"\\xc3": -1.0}],
        "text_offset": [0, 1],
    }


OF_PROMPT = PromptLogprobs((TokenLogprobs(0, math.nan, ()), TokenLogprobs(1, -2.0, ((7, -0.2),))))
WITH_PROMPT = (OF_PROMPT, *WITH_LOGPROBS)


def test_echo_with_logprobs_has_those_of_the_prompt_first() -> None:
    backend = FakeBackend(WITH_PROMPT)
    choice = ask({"prompt": [0, 1], "echo": True, "logprobs": 1}, backend)["choices"][0]
    assert choice["text"] == "abh"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "h", "\\xc3"],
        "token_logprobs": [None, -2.0, -0.5, -1.0],
        "top_logprobs": [None, {"h": -0.2, "b": -2.0}, {"b": -0.1, "h": -0.5}, {"\\xc3": -1.0}],
        "text_offset": [0, 1, 2, 3],
    }
    assert backend.completions[-1][1].prompt_logprobs == 1


def test_streamed_echo_comes_with_the_prompts_logprobs() -> None:
    body = {"prompt": [0, 1], "echo": True, "logprobs": 0, "stream": True}
    response = Client(server(FakeBackend(WITH_PROMPT))).post(PATH, body)
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert [choice["text"] for choice in choices] == ["ab", "h", ""]
    assert [choice["logprobs"]["text_offset"] for choice in choices] == [[0, 1], [2], [3]]


def test_streamed_logprobs_go_on_counting() -> None:
    response = Client(server(FakeBackend(WITH_LOGPROBS))).post(
        PATH, {"prompt": "p", "logprobs": 0, "stream": True}
    )
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert [choice["logprobs"]["text_offset"] for choice in choices] == [[0], [1]]
    assert choices[0]["logprobs"]["top_logprobs"] is None
    assert [choice["finish_reason"] for choice in choices] == [None, "length"]


def test_streamed_prompts_each_have_text_and_an_end() -> None:
    response = Client(server(FakeBackend(HELLO))).post(
        PATH,
        {"prompt": ["a", "b"], "echo": True, "stream": True, "stream_options": {"include_usage": True}},
    )
    chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line[6:].startswith("{")]
    for index, opening in enumerate("ab"):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == f"{opening}Hello wörld"
        assert own[-1]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 24
