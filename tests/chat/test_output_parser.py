"""From an answer's text to events: the same however the text was cut, nothing lost, nothing raised."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from answers import ANSWERS, BROKEN, CLOCK, NOW, PARIS, TOOLS, WEATHER, Meaning
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.chat.events import (
    ChatEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
)
from outrider.chat.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    harmony,
    hermes,
    inkling,
    invoke,
    solar_open,
    think,
)
from outrider.chat.formats.reasoning_format import ReasoningFormat
from outrider.chat.formats.tool_format import ToolFormat, ToolsByName
from outrider.chat.output_parser import OutputParser, new_splitter
from patience import in_test_or_soak

EXAMPLES = [(name, text, meaning) for name, answers in ANSWERS.items() for text, meaning in answers]
MESSAGES = {  # answers are lists of messages
    "harmony": harmony.REASONING,
    "inkling": inkling.REASONING,
    "solar_open": solar_open.REASONING,
}
SAMPLES = [*((n, t) for n, t, _ in EXAMPLES), *((n, t) for n, texts in BROKEN.items() for t in texts)]


def new_parser(
    format: str | ToolFormat | None,
    reasoning: ReasoningFormat | None = None,
    tools: ToolsByName = TOOLS,
    is_inside: bool = False,
    streams: bool = False,
    **settings: Any,
) -> OutputParser:
    tool_format = TOOL_FORMATS[format] if isinstance(format, str) else format
    if tool_format is not None:
        reasoning = MESSAGES.get(tool_format.name, reasoning)
    numbers = itertools.count()
    splitter = new_splitter(tool_format, reasoning, tools, starts_inside=is_inside, streams_calls=streams)
    return OutputParser(splitter, tools, new_id=lambda: f"call_{next(numbers)}", **settings)


def events_of(parser: OutputParser, pieces: Iterable[str]) -> list[ChatEvent]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged([*events, *parser.finish()])


def merged(events: Sequence[ChatEvent]) -> list[ChatEvent]:
    """Neighbouring deltas as one."""
    whole: list[ChatEvent] = []
    for event in events:
        last = whole[-1] if whole else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            whole[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            whole[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments):
            whole[-1] = replace(last, fragment=last.fragment + event.fragment)
        else:
            whole.append(event)
    return whole


def meaning_of(events: Sequence[ChatEvent]) -> Meaning:
    """Text and calls in order. Checks on the way that each call is complete and its fragments add up."""
    meaning: Meaning = []
    started: ToolCallStarted | None = None
    grown = ""
    for event in events:
        match event:
            case TextDelta(text):
                meaning.append(text)
            case ToolCallStarted(index):
                assert index == sum(isinstance(part, tuple) for part in meaning)
                started, grown = event, ""
            case ToolCallArguments(_, fragment):
                grown += fragment
            case ToolCallEnded(index, arguments):
                assert started is not None
                assert (started.index, grown) == (index, arguments)
                meaning.append((started.name, json.loads(arguments)))
                started = None
    assert started is None
    return meaning


@st.composite
def chunked(draw: st.DrawFn, texts: Sequence[str]) -> list[str]:
    text = draw(st.sampled_from(texts))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]


@pytest.mark.parametrize(("format", "text", "meaning"), EXAMPLES)
def test_an_answer_means_what_it_should(format: str, text: str, meaning: Meaning) -> None:
    assert meaning_of(events_of(new_parser(format), [text])) == meaning


@pytest.mark.parametrize(("format", "text", "meaning"), EXAMPLES)
def test_it_means_the_same_character_by_character(format: str, text: str, meaning: Meaning) -> None:
    assert meaning_of(events_of(new_parser(format), text)) == meaning


@pytest.mark.parametrize(("format", "text"), [(f, text) for f, texts in BROKEN.items() for text in texts])
def test_what_is_no_call_is_text_to_the_last_character(format: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert events_of(new_parser(format), pieces) == [TextDelta(text)]


@pytest.mark.parametrize("format", TOOL_FORMATS)
@given(data=st.data())
@settings(max_examples=in_test_or_soak(20, 150), deadline=None)
def test_any_chunking_yields_the_same_events(format: str, data: st.DataObject) -> None:
    pieces = data.draw(chunked([text for name, text in SAMPLES if name == format] or [""]))
    streams = data.draw(st.booleans())
    whole = events_of(new_parser(format, streams=streams), ["".join(pieces)])
    assert events_of(new_parser(format, streams=streams), pieces) == whole


@pytest.mark.parametrize("format", TOOL_FORMATS)
@given(data=st.data())
@settings(max_examples=in_test_or_soak(20, 200), deadline=None)
def test_any_mixture_of_markers_is_survived(format: str, data: st.DataObject) -> None:
    """Random rows of markers, JSON and text: the same events for any cut, and what is no call is kept."""
    region = TOOL_FORMATS[format].region
    scraps = [
        *region.markers,
        "clock",
        "get_weather",
        "{}",
        '{"name": "clock"}',
        '"',
        "}",
        "a b",
        " ",
        "\n",
        "<",
    ]
    parts = data.draw(st.lists(st.sampled_from(scraps), max_size=12))
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    events = events_of(new_parser(format), [text])
    assert events_of(new_parser(format), pieces) == events
    if format not in MESSAGES and not any(isinstance(event, ToolCallStarted) for event in events):
        assert "".join(event.text for event in events if isinstance(event, TextDelta)) == text


@pytest.mark.parametrize("odd", [7, True, "x", {}, [[]], [{}]])
@pytest.mark.parametrize(("format", "text", "meaning"), EXAMPLES)
def test_a_call_under_an_odd_schema_is_read(format: str, text: str, meaning: Meaning, odd: Any) -> None:
    """Clients' schemas are not checked: the call is given out as the model wrote it."""
    member = {"type": odd, "anyOf": odd, "oneOf": odd, "enum": odd}
    schema = {"type": odd, "properties": {"city": member, "days": member, "a": odd}, "required": odd}
    tools = {tool.name: replace(tool, parameters=schema) for tool in TOOLS.values()}
    found = meaning_of(events_of(new_parser(format, tools=tools), [text]))
    assert list(map(_name_or_text, found)) == list(map(_name_or_text, meaning))


def _name_or_text(part: str | tuple[str, dict[str, Any]]) -> str:
    return part if isinstance(part, str) else part[0]


@given(st.text())
def test_plain_answers_pass_through_untouched(text: str) -> None:
    for format, tools in ((None, {}), (hermes.FORMAT, TOOLS), (hermes.FORMAT, {})):
        events = events_of(new_parser(format, tools=tools), text)
        assert "".join(event.text for event in events if isinstance(event, TextDelta)) == text


def test_text_is_not_held_back_longer_than_it_must_be() -> None:
    parser = new_parser("hermes")
    assert parser.push("Hello wor") == [TextDelta("Hello wor")]
    assert parser.push("ld <tool") == [TextDelta("ld")]
    assert parser.push("s>") == [TextDelta(" <tools>")]


def test_without_tools_calls_are_text() -> None:
    text = ANSWERS["hermes"][0][0]
    assert events_of(new_parser("hermes", tools={}), [text]) == [TextDelta(text)]


# -- calls that a grammar forced ---------------------------------------------------------------------------


def test_forced_arguments_are_passed_on_while_they_grow() -> None:
    parser = new_parser("hermes", streams=True)
    head = '<tool_call>\n{"name": "get_weather", "arguments": '
    assert parser.push(head) == []
    assert parser.push('{"ci') == [ToolCallStarted(0, "call_0", "get_weather"), ToolCallArguments(0, '{"ci')]
    assert parser.push('ty": "}"}') == [
        ToolCallArguments(0, 'ty": "}"}'),
        ToolCallEnded(0, '{"city": "}"}'),
    ]
    assert parser.push("}\n</tool_call>") == []
    assert parser.finish() == []


@pytest.mark.parametrize(
    "format",
    ["hermes", "llama3", "mistral", "deepseek", "deepseek_v3", "harmony", "plamo3", "inkling", "solar_open"],
)
def test_streamed_calls_mean_the_same_as_whole_ones(format: str) -> None:
    for text, meaning in ANSWERS[format]:
        if format != "llama3" or text.startswith("{"):
            assert meaning_of(events_of(new_parser(format, streams=True), list(text))) == meaning


def test_a_forced_call_that_is_cut_short_still_ends() -> None:
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa'
    events = events_of(new_parser("hermes", streams=True), [text])
    assert events[-1] == ToolCallEnded(0, '{"city": "Pa')


# -- which calls stand -------------------------------------------------------------------------------------


def test_only_the_first_call_is_given_out_when_calls_may_not_be_parallel() -> None:
    for format in ("hermes", "mistral_list", "minimax"):
        text, meaning = next((t, m) for t, m in ANSWERS[format] if sum(isinstance(x, tuple) for x in m) == 2)
        parser = new_parser(format, is_parallel=False)
        calls = [part for part in meaning if isinstance(part, tuple)]
        assert meaning_of(events_of(parser, [text, "more text"])) == calls[:1]
        assert parser.is_complete


@pytest.mark.parametrize(("is_strict", "expected"), [(True, "text"), (False, "call")])
def test_a_strict_schema_is_a_promise(is_strict: bool, expected: str) -> None:
    tools = {"get_weather": replace(WEATHER, strict=is_strict)}
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": 3}}</tool_call>'
    events = events_of(new_parser("hermes", tools=tools), [text])
    assert events == [TextDelta(text)] if expected == "text" else isinstance(events[0], ToolCallStarted)


def test_an_unknown_tool_in_a_list_makes_all_of_it_text() -> None:
    text = '[TOOL_CALLS][{"name": "clock", "arguments": {}}, {"name": "nobody", "arguments": {}}]'
    assert events_of(new_parser("mistral_list"), [text]) == [TextDelta(text)]


def test_kimi_keeps_the_ids_that_the_model_gave() -> None:
    events = events_of(new_parser("kimi"), [ANSWERS["kimi"][0][0]])
    assert [e.id for e in events if isinstance(e, ToolCallStarted)] == [
        "functions.get_weather:0",
        "functions.clock:1",
    ]


def test_kimi_gives_out_no_endless_id() -> None:
    answer = ANSWERS["kimi"][0][0].replace("clock:1", "clock:" + "1" * 2000)
    events = events_of(new_parser("kimi"), [answer])
    assert [e.id for e in events if isinstance(e, ToolCallStarted)] == ["functions.get_weather:0"]


# -- reasoning ---------------------------------------------------------------------------------------------

R, T = ReasoningDelta, TextDelta


@pytest.mark.parametrize(
    ("text", "is_inside", "expected"),
    [
        ("<think>\nhm\n</think>\n\nHi", False, [R("hm"), T("Hi")]),
        ("\n<think>hm</think>Hi", False, [R("hm"), T("Hi")]),
        ("hm, < 3\n\n</think>\n\nHi", True, [R("hm, < 3"), T("Hi")]),
        ("<think>\n\n</think>\n\nHi", False, [T("Hi")]),
        ("Hi <think>no</think>", False, [T("Hi <think>no</think>")]),
        ("  Hi", False, [T("  Hi")]),
        ("<thin", False, [T("<thin")]),
        ("never ends\n", True, [R("never ends\n")]),
        ("a</think>b</think>c", True, [R("a"), T("b</think>c")]),
        ("</think>Hi\n", True, [T("Hi\n")]),
    ],
)
def test_thinking_is_kept_apart(text: str, is_inside: bool, expected: list[ChatEvent]) -> None:
    for pieces in ([text], list(text)):
        assert events_of(new_parser(None, think.THINK, {}, is_inside), pieces) == expected


@pytest.mark.parametrize("format", [f for f in REASONING_FORMATS.values() if f.name != "harmony"])
def test_every_pair_of_tags_is_understood(format: ReasoningFormat) -> None:
    text = f"{format.opening}\nhm{format.closing}Hi"
    assert events_of(new_parser(None, format, {}), list(text)) == [R("hm"), T("Hi")]


def test_a_call_after_thinking_leaves_no_layout_behind() -> None:
    text = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\n'
    events = events_of(new_parser("hermes", think.THINK), list(text))
    assert [type(event) for event in events] == [R, ToolCallStarted, ToolCallArguments, ToolCallEnded]


def test_harmony_channels_say_what_is_thought_and_what_is_said() -> None:
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>analysis<|message|> so<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hi<|return|>"
    )
    for pieces in ([text], list(text)):
        assert events_of(new_parser("harmony", tools={}), pieces) == [R("hm so"), T("Hi")]
        inside = "".join(pieces).removeprefix(harmony.REASONING.opening)
        assert events_of(new_parser("harmony", tools={}, is_inside=True), inside) == [R("hm so"), T("Hi")]


MUSE_CALL = (
    '<atem:function_calls>\n<atem:invoke name="clock">\n</atem:invoke>\n</atem:function_calls>'  # one line
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>Hi<|eot|>", [R("hm"), T("Hi")]),
        (" to=user<|message|>Hi<|eot|>", [T("Hi")]),
        ("Hi without a header", [T("Hi without a header")]),
        (f"{'x' * 300}<|message|>Hi", [T(f"{'x' * 300}<|message|>Hi")]),
        (" to=user<|message|>Hi<|eom|><|start|>assistant to=us", [T("Hi")]),
        (
            " to=self<|message|>a<|eom|><|start|>assistant to=commentary<|message|>So.<|eom|>"
            "<|start|>assistant to=self<|message|>b<|eom|>",
            [R("a"), T("So."), R("b")],
        ),
        (
            f" to=self<|message|>{MUSE_CALL}<|eom|><|start|>assistant to=user<|message|>{MUSE_CALL}<|eot|>",
            [R(MUSE_CALL), T(MUSE_CALL)],  # only messages to a function are calls
        ),
    ],
)
def test_messages_say_what_is_thought_and_what_is_said(text: str, expected: list[ChatEvent]) -> None:
    for pieces in ([text], list(text)):
        assert events_of(new_parser("muse", invoke.MUSE_REASONING), pieces) == expected


@pytest.mark.parametrize("header", ["<|start|>assistant to=clock<|message|>", ""])
def test_calls_are_messages_with_and_without_a_header(header: str) -> None:
    text = f" to=self<|message|>hm<|eom|>{header}{MUSE_CALL}<|eot|>"
    for pieces in ([text], list(text)):
        events = events_of(new_parser("muse", invoke.MUSE_REASONING), pieces)
        assert events[0] == R("hm")
        assert meaning_of(events) == [NOW]


def test_the_tags_around_an_answer_are_left_out() -> None:
    ernie = "so\n</think>\n\n\n<response>\nHi\n</response>\n"
    parser = new_parser(None, think.ERNIE, {}, is_inside=True, hidden=think.ERNIE.layout)
    assert events_of(parser, list(ernie)) == [R("so"), T("Hi\n\n")]
    cohere = "<|START_THINKING|>so<|END_THINKING|><|START_TEXT|>Hi<|END_TEXT|>"
    parser = new_parser("cohere", think.COHERE, hidden=think.COHERE.layout)
    assert events_of(parser, list(cohere)) == [R("so"), T("Hi")]


def test_reasoning_is_remembered_for_counting() -> None:
    parser = new_parser(None, think.THINK, {})
    events_of(parser, list("<think>one\n\ntwo</think>three"))
    assert parser.reasoning == "one\n\ntwo"


def test_special_tokens_that_nobody_should_see_are_left_out() -> None:
    parser = new_parser("mistral", hidden=["</s>", "[INST]"])
    text = "a</s>b[INST]c[IN[TOOL_CALLS]clock[ARGS]{}"
    assert meaning_of(events_of(parser, list(text))) == ["abc[IN", NOW]


def test_every_format_has_examples() -> None:
    assert set(ANSWERS) == set(TOOL_FORMATS)
    assert {PARIS[0], CLOCK.name} <= set(TOOLS)
