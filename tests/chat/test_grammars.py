"""Grammars: forced calls in each model's own format, answers under a form, and where a grammar starts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from answers import CLOCK, TOOLS, WEATHER
from chat_tokenizers import CHATML, SPECIAL, plain_tokenizer
from llguidance import LLMatcher, grammar_from
from llguidance.hf import from_tokenizer
from test_output_parser import MESSAGES
from written_calls import WRITERS

from outrider.answer_form import Grammar
from outrider.chat.conversation import ChatRequest, Message, NamedTool, TextPart, Tool
from outrider.chat.events import ToolCallEnded, ToolCallStarted
from outrider.chat.formats import TOOL_FORMATS, glm, harmony, hermes, qwen3_coder, think
from outrider.chat.formats.call_grammar import (
    Element,
    FreeText,
    JsonValue,
    OneOf,
    OptionalElements,
    Pattern,
    Repeated,
    Separated,
)
from outrider.chat.formats.tool_format import ToolFormat
from outrider.chat.grammars import Constraint, Thinking, constraint_for, free_calls, interrupting
from outrider.chat.output_parser import OutputParser, new_splitter
from outrider.chat.renderer import ChatRenderer
from outrider.chat.special_tokens import Vocabulary
from outrider.grammar.backend import new_matcher
from outrider.grammar.lazy import LazyRowGrammar
from outrider.grammar.matcher import CompiledGrammar, RowGrammar
from outrider.grammar.triggers import CompiledTriggers, TokenTexts
from outrider.request import InvalidRequest, SamplingParams

FORCEABLE = [format for format in TOOL_FORMATS.values() if format.call_grammar is not None]
ARGUMENTS = {"city": "Paris", "days": 2, "units": "metric"}
UNKNOWN = replace(hermes.FORMAT, name="unknown", call_grammar=None)
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
    if format is not None:
        reasoning = MESSAGES.get(format.name, reasoning)
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
    markers = "".join(marker for marker in format.region.markers if "parameter" not in marker)
    return tuple(dict.fromkeys(re.findall(r"<[^<>]+>|\[[A-Z_]+\]", markers)))


def written(parts: Sequence[Element], arguments: dict[str, Any]) -> str:
    """A call as its format writes it. `arguments` loses the arguments that were written."""
    text = ""
    for part in parts:
        match part:
            case str():
                text += part
            case JsonValue(schema):
                is_whole = "city" in schema.get("properties", {}) or schema.get("properties") == {}
                text += json.dumps(arguments if is_whole else arguments.pop(_named(text, arguments)))
            case FreeText(until):
                text += str(arguments.pop("city", "")) + until
            case OneOf(choices) if "number" in choices:
                text += "number"
            case OneOf(choices):
                assert arguments["units"] in choices
                text += arguments.pop("units")
            case Pattern(_, example):
                text += example
            case OptionalElements(inner):
                text += written(inner, arguments) if _names(inner) & arguments.keys() else ""
            case Separated(items, separator):
                kept = [inner for inner, _ in items if _names(inner) & arguments.keys()]
                text += separator.join(written(inner, arguments) for inner in kept)
            case Repeated():
                raise AssertionError("no tool here has a list")
    return text


def _named(text: str, arguments: dict[str, Any]) -> str:
    """The argument whose name was written last."""
    return max(arguments, key=text.rfind)


def _names(parts: Sequence[Element]) -> set[str]:
    """The argument whose name these elements write."""
    text = "".join(part for part in parts if isinstance(part, str))
    return {name for name in ARGUMENTS if name in text}


def forced_text(format: ToolFormat, *calls: tuple[Tool, dict[str, Any]]) -> str:
    assert format.call_grammar is not None
    texts = [written(format.call_grammar(tool), dict(arguments)) for tool, arguments in calls]
    start = format.around[0]
    before = start if isinstance(start, str) else written(start, {})
    tagged = [format.tags[0] + text + format.tags[1] for text in texts]
    return before + format.between.join(tagged) + format.around[1]


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("format", FORCEABLE, ids=lambda format: format.name)
def test_a_forced_call_is_written_in_the_models_own_format(format: ToolFormat, has_tokens: bool) -> None:
    special = markers_of(format) if has_tokens else ()
    found = constraint(format, request_for(tool_choice="required"), special)
    assert found.streams_calls
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
    reasoning = MESSAGES.get(format.name)
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
        (UNKNOWN, {"tool_choice": "required"}, '"unknown"'),
        (UNKNOWN, {"tool_choice": NamedTool("clock")}, "a grammar cannot force"),
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
    assert not found.streams_calls
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


# -- calls that are not forced -------------------------------------------------------------------------------

# What grammars write in another way than templates do: strings as CDATA, or as JSON in Python.
OTHER_STYLE = {
    "minicpm5": ("Paris", "<![CDATA[Paris]]>"),
    **dict.fromkeys(("lfm2", "pythonic", "olmo3", "gemma3"), ("'Paris'", '"Paris"')),
}
TWO_CALLS = [("get_weather", {"city": "Paris", "days": 2}), ("clock", {})]


def lazy_row(
    format: ToolFormat,
    special: tuple[str, ...] = (),
    tools: Sequence[Tool] = (WEATHER, CLOCK),
    reasoning: Any = None,
    starts_inside: bool = False,
) -> LazyRowGrammar:
    reasoning = MESSAGES.get(format.name, reasoning)
    vocabulary = Vocabulary(tokenizer_with(special))
    grammar = free_calls(tools, format, reasoning, starts_inside, True, vocabulary).grammar
    assert grammar is not None
    assert grammar.triggers is not None
    compiled = CompiledGrammar(lambda: new_matcher(tables_of(special), grammar))
    vocab_size = len(tokenizer_with(special))
    texts = TokenTexts(tables_of(special), vocab_size)
    triggers = CompiledTriggers(grammar.triggers, texts, compiled.new_matcher)
    eos_id = tokenizer_with(special).eos_token_id
    return LazyRowGrammar(RowGrammar(compiled, vocab_size, {eos_id}, (), triggers.mask_after_call), triggers)


def follow(row: LazyRowGrammar, text: str, special: tuple[str, ...] = ()) -> str:
    """The part of a text that a row may write."""
    ids = tokenizer_with(special).encode(text, add_special_tokens=False)
    for i, token_id in enumerate(ids):
        masks = row.masks(())
        if masks is not None and not masks[0][token_id // 32] >> (token_id % 32) & 1:
            return str(tokenizer_with(special).decode(ids[:i]))
        row.commit(token_id)
    return text


def free_text(format: ToolFormat, calls: Sequence[tuple[str, dict[str, Any]]] = TWO_CALLS) -> str:
    style = OTHER_STYLE.get(format.name, ("", ""))
    return WRITERS[format.name](calls).replace(*style)


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("format", FORCEABLE, ids=lambda format: format.name)
def test_a_free_answer_has_calls_in_the_models_own_format(format: ToolFormat, has_tokens: bool) -> None:
    special = markers_of(format) if has_tokens else ()
    row = lazy_row(format, special)
    before = "" if format.region.opens_answer_only else "I look. <tool is {no} call> "
    text = f"{before}{free_text(format)}"
    assert follow(row, text, special) == text
    assert not row.is_restricting  # asleep again
    assert follow(row, " And more.", special) == " And more."


@pytest.mark.parametrize("format", FORCEABLE, ids=lambda format: format.name)
def test_a_free_call_cannot_be_malformed(format: ToolFormat) -> None:
    good = free_text(format)
    for old, new in [("get_weather", "get_wether"), ("days", "dayz"), ("2", "true")]:
        if format.region.opens_answer_only and old == "get_weather":
            continue  # there a call starts with the name of a tool: anything else is text
        bad = good.replace(old, new)
        assert bad != good
        assert follow(lazy_row(format), bad) != bad, (old, new)


@pytest.mark.parametrize("format", FORCEABLE, ids=lambda format: format.name)
def test_a_call_cannot_end_before_its_end(format: ToolFormat) -> None:
    row, text = lazy_row(format), free_text(format)
    eos_id = tokenizer_with(()).eos_token_id
    assert row.masks(()) is None
    follow(row, text[: text.index("Paris") + 3])
    masks = row.masks(())
    assert masks is not None
    assert not masks[0][eos_id // 32] >> (eos_id % 32) & 1


@pytest.mark.parametrize("format", FORCEABLE, ids=lambda format: format.name)
def test_with_strict_false_the_arguments_are_free_and_the_name_is_not(format: ToolFormat) -> None:
    renderer = ChatRenderer(tokenizer_with(()), tool_format=format)
    tools = (replace(WEATHER, strict=False), replace(CLOCK, strict=False))
    grammar = renderer.render(replace(request_for(), tools=tools)).params.grammar
    assert grammar is not None
    assert "imperial" not in grammar.text
    assert "get_weather" in grammar.text


@pytest.mark.parametrize("closing", ["</think>", "\n</think>\n\n"])
def test_markers_in_reasoning_are_text(closing: str) -> None:
    row = lazy_row(hermes.FORMAT, reasoning=think.THINK, starts_inside=True)
    text = "I could write <tool_call> here. <tool_call>x"
    assert follow(row, text) == text
    assert follow(row, closing + "<tool_call>x") == closing + "<tool_call>"
    row = lazy_row(hermes.FORMAT, reasoning=think.THINK)
    text = "\n<think>a <tool_call>b</think>c <tool_call>"
    assert follow(row, text + "x") == text


def test_a_special_token_that_opens_calls_ends_the_reasoning() -> None:
    format = TOOL_FORMATS["kimi"]
    special = markers_of(format)
    row = lazy_row(format, special, reasoning=think.THINK, starts_inside=True)
    text = "hm" + free_text(format)
    assert follow(row, text, special) == text
    assert follow(row, "<|tool_calls_section_begin|>x", special) == "<|tool_calls_section_begin|>"
    interrupts = interrupting(format, Vocabulary(tokenizer_with(special)))
    splitter = new_splitter(format, think.THINK, TOOLS, starts_inside=True, interrupting=interrupts)
    parser = OutputParser(splitter, TOOLS)
    events = [event for piece in text for event in parser.push(piece)] + parser.finish()
    assert parser.reasoning == "hm"
    assert [event.name for event in events if isinstance(event, ToolCallStarted)] == ["get_weather", "clock"]


def test_models_may_leave_out_the_outer_tags() -> None:
    text = "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>"
    row = lazy_row(qwen3_coder.FORMAT)
    assert follow(row, text) == text
    assert not row.is_restricting
    assert follow(row, "<function=nobody>") == "<function="


def test_large_and_odd_arguments_are_written() -> None:
    content = "é😀 \\ </tool> {[ \n" * 500
    text = free_text(hermes.FORMAT, [("get_weather", {"city": content}), ("clock", {})])
    row = lazy_row(hermes.FORMAT)
    assert follow(row, text) == text


@pytest.mark.parametrize("format", FORCEABLE, ids=lambda format: format.name)
def test_free_calls_are_read_back_while_they_arrive(format: ToolFormat) -> None:
    reasoning = MESSAGES.get(format.name)
    streams = not format.region.opens_answer_only
    parser = OutputParser(new_splitter(format, reasoning, TOOLS, streams_calls=streams), TOOLS)
    text = free_text(format)
    events = [event for piece in text for event in parser.push(piece)] + parser.finish()
    calls = TWO_CALLS[:1] if format.is_single else TWO_CALLS
    assert [e.name for e in events if isinstance(e, ToolCallStarted)] == [name for name, _ in calls]
    assert [json.loads(e.arguments) for e in events if isinstance(e, ToolCallEnded)] == [a for _, a in calls]


def test_no_grammar_is_built_that_nobody_needs() -> None:
    renderer = ChatRenderer(tokenizer_with(()))
    assert renderer.render(request_for()).params.grammar is not None
    assert renderer.render(request_for(tool_choice="none")).params.grammar is None
    assert renderer.render(replace(request_for(), tools=())).params.grammar is None
    off = ChatRenderer(tokenizer_with(()), has_tool_grammar=False)
    assert off.render(request_for()).params.grammar is None
    assert off.render(request_for(tool_choice="required")).params.grammar is not None
