"""Grammars of tools that cannot be used: who is served without them, and who insists."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from answers import CLOCK, WEATHER
from chat_tokenizers import new_tokenizer

from outrider.chat.conversation import ChatRequest, Message, TextPart, Tool
from outrider.chat.renderer import ChatPrompt, ChatRenderer
from outrider.chat.validation import validated
from outrider.engine.validation import ValidatedRequest
from outrider.isolation.worker import WorkerUnavailable
from outrider.request import InvalidGrammar, InvalidRequest, PromptTooLong, Request, SamplingParams

BAD = Tool("bad", "", {"type": "object", "properties": {"a": {"type": "string", "pattern": "(unclosed"}}})


def rendered(*tools: Tool) -> ChatPrompt:
    request = ChatRequest([Message("user", (TextPart("hi"),))], SamplingParams(), tools)
    return ChatRenderer(new_tokenizer()).render(request)


def refusing(refuses: Callable[[str], bool], error: Exception | None = None) -> Any:
    """A validation that refuses some grammars by their texts."""

    def validate(prompt: ChatPrompt) -> ValidatedRequest:
        grammar = prompt.params.grammar
        if grammar is not None and refuses(grammar.text):
            raise error or InvalidGrammar("the lark grammar cannot be used: no")
        return ValidatedRequest(Request("r", prompt.ids, prompt.params))

    return validate


def test_a_schema_that_cannot_be_enforced_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    prompt = rendered(BAD, WEATHER)
    with caplog.at_level(logging.WARNING):
        served, request = validated(prompt, refusing(lambda text: "unclosed" in text))
    assert "the schemas of tools are not enforced" in caplog.text
    assert served.ids == prompt.ids
    grammar = request.request.params.grammar
    assert grammar is not None
    assert "get_weather" in grammar.text
    assert "unclosed" not in grammar.text


@pytest.mark.parametrize("error", [InvalidGrammar("too long"), WorkerUnavailable("killed")])
def test_without_any_grammar_the_request_is_served(error: Exception) -> None:
    served, request = validated(rendered(WEATHER), refusing(lambda text: True, error))
    assert request.request.params.grammar is None
    parser = served.new_parser()  # arguments are checked before they are given out
    assert parser.push('<tool_call>{"name": "clock", "arguments": {"a') == []


def test_strict_tools_keep_their_schemas() -> None:
    strict = replace(WEATHER, strict=True)
    _, request = validated(rendered(BAD, strict), refusing(lambda text: "unclosed" in text))
    assert request.request.params.grammar is not None
    assert "imperial" in request.request.params.grammar.text


def test_a_strict_tool_whose_schema_cannot_be_enforced_is_refused() -> None:
    with pytest.raises(InvalidGrammar, match="a tool with strict: true cannot be enforced: the lark"):
        validated(rendered(replace(BAD, strict=True), CLOCK), refusing(lambda text: "unclosed" in text))


def test_other_refusals_are_passed_on_at_once() -> None:
    for error in (PromptTooLong("long", "9 tokens", 8), InvalidRequest("no")):
        with pytest.raises(type(error)):
            validated(rendered(WEATHER), refusing(lambda text: True, error))


def test_five_hundred_tools_have_one_grammar() -> None:
    tools = [replace(WEATHER, name=f"tool_{i}") for i in range(500)]
    grammar = rendered(*tools).params.grammar
    assert grammar is not None
    assert "tool_499" in grammar.text
