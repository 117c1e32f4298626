"""Grammars: forced calls in each model's own format, answers under a form, and where a grammar starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from answers import CLOCK, TOOLS, WEATHER
from chat_tokenizers import CHATML, SPECIAL, plain_tokenizer
from llguidance import LLMatcher, grammar_from
from llguidance.hf import from_tokenizer

from outrider.chat.conversation import ChatRequest, Message, NamedTool, TextPart, Tool
from outrider.chat.events import ToolCallEnded, ToolCallStarted
from outrider.chat.formats import TOOL_FORMATS, glm, harmony, hermes, qwen3_coder, think
from outrider.chat.formats.call_grammar import Element, FreeText, JsonValue, OneOf, OptionalElements
from outrider.chat.formats.tool_format import ToolFormat
from outrider.chat.grammars import Constraint, Thinking, constraint_for
from outrider.chat.output_parser import OutputParser, new_splitter
from outrider.chat.special_tokens import Vocabulary
from outrider.request import Grammar, InvalidRequest, SamplingParams

FORCEABLE = [format for format in TOOL_FORMATS.values() if format.call_grammar is not None]
ARGUMENTS = {"city": "Paris", "days": 2, "units": "metric"}
COLOUR = Grammar("json_schema", '{"enum": ["red", "green"]}')


@cache
def tokenizer_with(special: tuple[str, ...]) -> Any:
    return plain_tokenizer(CHATML, (*SPECIAL[:2], *special))


@cache
def tables_of(special: tuple[str, ...]) -> Any:
    return from_tokenizer(tokenizer_with(special))


def request_for(**changes: Any) -> ChatRequest:
    return ChatRequest([Message("user", (TextPart("hi"),))], SamplingParams(), (WEATHER, CLOCK), **changes)


def constraint(
    format: ToolFormat | None,
    request: ChatRequest,
    special: tuple[str, ...] = (),
    reasoning: Any = None,
    thinking: Thinking = "off",
) -> Constraint:
    if format is harmony.FORMAT:
        reasoning = harmony.REASONING
    return constraint_for(request, format, reasoning, thinking, Vocabulary(tokenizer_with(special)))


def accepts(grammar: Grammar | None, text: str, special: tuple[str, ...] = ()) -> bool:
    """Whether a grammar takes a text whole, as the model's tokens."""
    assert grammar is not None
    definition = grammar_from(grammar.kind, grammar.text)
    assert LLMatcher.validate_grammar(definition, tables_of(special)) == ""
    matcher = LLMatcher(tables_of(special), definition)
    ids = tokenizer_with(special).encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def markers_of(format: ToolFormat) -> tuple[str, ...]:
    """A format's markers as tokens of their own, as its models have them: all but the tags of parameters."""
    markers = (marker for marker in format.region.markers if "parameter" not in marker)
    return tuple(marker for marker in markers if marker[0] in "<[" and marker[-1] in ">]")


def written(tool: Tool, parts: Sequence[Element], arguments: dict[str, Any]) -> str:
    """A call as its format writes it."""
    text = ""
    left = dict(arguments)
    for part in parts:
        match part:
            case str():
                text += part
            case JsonValue(schema):
                text += json.dumps(left if schema.get("type") == "object" else left.pop("days"))
            case FreeText(until):
                text += str(left.pop("city")) + until
            case OneOf(choices):
                assert left.pop("units") in choices
                text += arguments["units"]
            case OptionalElements(inner):
                text += written(tool, inner, {key: left[key] for key in ("days", "units") if key in left})
                left.pop("days" if "days" in left and len(left) == 2 else "units", None)
    return text


def forced_text(format: ToolFormat, *calls: tuple[Tool, dict[str, Any]]) -> str:
    assert format.call_grammar is not None
    texts = [written(tool, format.call_grammar(tool), arguments) for tool, arguments in calls]
    return format.around[0] + format.between.join(texts) + format.around[1]


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("format", FORCEABLE, ids=lambda format: format.name)
def test_a_forced_call_is_written_in_the_models_own_format(format: ToolFormat, has_tokens: bool) -> None:
    special = markers_of(format) if has_tokens else ()
    found = constraint(format, request_for(tool_choice="required"), special)
    assert found.forces_call
    assert found.grammar is not None
    one = forced_text(format, (WEATHER, ARGUMENTS))
    two = forced_text(format, (WEATHER, ARGUMENTS), (CLOCK, {}))
    assert accepts(found.grammar, one, special)
    assert accepts(found.grammar, "\n\n" + one, special)
    assert accepts(found.grammar, two, special) == (not format.is_single)
    assert not accepts(found.grammar, one.replace("get_weather", "get_wether"), special)
    assert not accepts(found.grammar, "No.", special)


@pytest.mark.parametrize("format", FORCEABLE, ids=lambda format: format.name)
def test_a_forced_call_is_read_back(format: ToolFormat) -> None:
    reasoning = harmony.REASONING if format is harmony.FORMAT else None
    for streams in (True, False):
        parser = OutputParser(new_splitter(format, reasoning, TOOLS, streams_calls=streams), TOOLS)
        text = forced_text(format, (WEATHER, ARGUMENTS))
        events = [event for piece in text for event in parser.push(piece)] + parser.finish()
        assert [event.name for event in events if isinstance(event, ToolCallStarted)] == ["get_weather"]
        assert [json.loads(e.arguments) for e in events if isinstance(e, ToolCallEnded)] == [ARGUMENTS]
        assert all(hasattr(event, "index") for event in events)  # no text is left over


@pytest.mark.parametrize("format", [hermes.FORMAT, qwen3_coder.FORMAT, glm.FORMAT], ids=lambda f: f.name)
def test_forced_arguments_keep_to_the_schema(format: ToolFormat) -> None:
    grammar = constraint(format, request_for(tool_choice="required")).grammar
    good = forced_text(format, (WEATHER, ARGUMENTS))
    assert accepts(grammar, good)
    assert not accepts(grammar, good.replace("2", '"two"'))
    assert not accepts(grammar, good.replace("metric", "nautical"))


def test_a_named_tool_is_called_once() -> None:
    grammar = constraint(hermes.FORMAT, request_for(tool_choice=NamedTool("clock"))).grammar
    assert accepts(grammar, forced_text(hermes.FORMAT, (CLOCK, {})))
    assert not accepts(grammar, forced_text(hermes.FORMAT, (WEATHER, ARGUMENTS)))
    assert not accepts(grammar, forced_text(hermes.FORMAT, (CLOCK, {}), (CLOCK, {})))


def test_calls_that_may_not_be_parallel_are_one() -> None:
    grammar = constraint(
        hermes.FORMAT, request_for(tool_choice="required", parallel_tool_calls=False)
    ).grammar
    assert not accepts(grammar, forced_text(hermes.FORMAT, (CLOCK, {}), (CLOCK, {})))


def test_keywords_that_a_grammar_does_not_know_are_passed_over_unless_the_tool_is_strict() -> None:
    odd = Tool("odd", "", {"type": "object", "properties": {"a": {"type": "string", "format": "zork"}}})
    for is_strict in (False, True):
        request = replace(request_for(tool_choice="required"), tools=(replace(odd, strict=is_strict),))
        grammar = constraint(hermes.FORMAT, request).grammar
        assert grammar is not None
        problem = LLMatcher.validate_grammar(grammar_from("lark", grammar.text), tables_of(()))
        assert bool(problem) == is_strict


@pytest.mark.parametrize("odd", [None, 7, True, "x", {}, [[]], [None]])
@pytest.mark.parametrize("format", FORCEABLE, ids=lambda format: format.name)
def test_a_call_under_an_odd_schema_can_be_forced(format: ToolFormat, odd: Any) -> None:
    """The grammar's own parser tells the client what it does not understand."""
    member = {"type": ["string", odd], "anyOf": odd, "oneOf": odd, "enum": odd}
    schema = {"type": odd, "properties": {"a": member, "b": odd}, "required": odd}
    request = replace(request_for(tool_choice="required"), tools=(Tool("odd", "", schema),))
    assert constraint(format, request).grammar is not None


@pytest.mark.parametrize("kind", ["array", "string", None, ["object", "null"]])
def test_forced_arguments_are_an_object_whatever_the_schema_says(kind: Any) -> None:
    tools = (Tool("odd", "", {"type": kind, "properties": {"a": {"type": "integer"}}}),)
    grammar = constraint(hermes.FORMAT, replace(request_for(tool_choice="required"), tools=tools)).grammar
    assert accepts(grammar, '<tool_call>\n{"name": "odd", "arguments": {"a": 1}}\n</tool_call>')
    for other in ("[]", '"x"', "null"):
        assert not accepts(grammar, f'<tool_call>\n{{"name": "odd", "arguments": {other}}}\n</tool_call>')


@pytest.mark.parametrize(
    ("format", "changes", "message"),
    [
        (hermes.FORMAT, {"tool_choice": NamedTool("nobody")}, "'nobody', which is not among the tools"),
        (TOOL_FORMATS["gemma4"], {"tool_choice": "required"}, '"gemma4"'),
        (TOOL_FORMATS["lfm2"], {"tool_choice": NamedTool("clock")}, "a grammar cannot force"),
        (hermes.FORMAT, {"grammar": Grammar("lark", 'start: "a"')}, "cannot be combined with tools"),
    ],
)
def test_what_cannot_be_forced_is_refused(format: ToolFormat, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        constraint(format, request_for(**changes))


def test_a_call_cannot_be_required_without_tools() -> None:
    with pytest.raises(InvalidRequest, match="needs tools"):
        constraint(hermes.FORMAT, replace(request_for(tool_choice="required"), tools=()))


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_free_answers_have_no_grammar(choice: Any) -> None:
    assert not request_for(tool_choice=choice).is_constrained


# -- answers under a form ----------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_form_passes_through_untouched_where_no_call_may_come(choice: Any) -> None:
    request = request_for(grammar=COLOUR, tool_choice=choice)
    if choice == "auto":
        request = replace(request, tools=())
    assert constraint(hermes.FORMAT, request) == Constraint(COLOUR)


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (COLOUR, '"red"', '"blue"'),
        (Grammar("json_object"), '{"a": 1}', "[1]"),
        (Grammar("regex", "a+/b"), "aa/b", "ab"),
    ],
)
def test_beside_tools_an_answer_is_a_call_or_has_its_form(form: Grammar, good: str, bad: str) -> None:
    found = constraint(hermes.FORMAT, request_for(grammar=form))
    assert not found.forces_call
    assert accepts(found.grammar, good)
    assert accepts(found.grammar, forced_text(hermes.FORMAT, (CLOCK, {})))
    assert not accepts(found.grammar, bad)


# -- where a grammar starts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thinking", "opens", "waits"), [("inside", False, True), ("free", True, True), ("off", False, False)]
)
def test_a_grammar_waits_for_the_end_of_reasoning(thinking: Thinking, opens: bool, waits: bool) -> None:
    request = replace(request_for(grammar=COLOUR), tools=())
    found = constraint(hermes.FORMAT, request, reasoning=think.THINK, thinking=thinking)
    end = tokenizer_with(()).convert_tokens_to_ids("</think>")
    assert found.grammar == replace(COLOUR, after_ids=(end,) if waits else ())
    assert found.opens_reasoning == opens


@pytest.mark.parametrize("form", [COLOUR, Grammar("lark", 'start: "\\"red\\""'), Grammar("regex", '"red"')])
def test_an_end_of_reasoning_that_is_no_token_is_part_of_the_grammar(form: Grammar) -> None:
    request = replace(request_for(grammar=form), tools=())
    grammar = constraint(hermes.FORMAT, request, reasoning=think.SEED, thinking="inside").grammar
    assert accepts(grammar, 'I think.\n</seed:think>"red"')
    assert not accepts(grammar, 'I think.\n</seed:think>"blue"')
    assert not accepts(grammar, '"red"')


def test_a_forced_call_too_waits_for_the_end_of_reasoning() -> None:
    request = request_for(tool_choice="required")
    found = constraint(hermes.FORMAT, request, reasoning=think.SEED, thinking="free")
    assert found.opens_reasoning
    assert accepts(found.grammar, "hm</seed:think>\n\n" + forced_text(hermes.FORMAT, (CLOCK, {})))


def test_harmony_grammars_start_in_the_right_channel() -> None:
    special = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>")
    encode = tokenizer_with(special).encode
    answer = constraint(harmony.FORMAT, request_for(grammar=COLOUR), special)
    assert answer.grammar == replace(COLOUR, after_ids=tuple(encode("<|channel|>final<|message|>")))
    assert not answer.opens_reasoning
    call = constraint(harmony.FORMAT, request_for(tool_choice="required"), special)
    assert call.grammar is not None
    assert call.grammar.after_ids == tuple(encode("<|end|>"))
    assert call.opens_reasoning
