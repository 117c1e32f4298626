"""Inkling: an answer is a list of messages, each with the kind of its content. Calls are JSON with `args`.

<|message_model|>f<|content_invoke_tool_json|>{"name":"f","args":{"a":1}}<|end_message|>
"""

from __future__ import annotations

import re

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar, Pattern
from outrider.chat.formats.json_calls import arguments_of, call_with, header
from outrider.chat.formats.reasoning_format import Framing, MessageKind, ReasoningFormat
from outrider.chat.formats.tool_format import ParsedCall, Region, ToolFormat, ToolsByName
from outrider.chat.json_text import dumps, ends_in_string, loads

_CALL, _THINKING, _TEXT = "<|content_invoke_tool_json|>", "<|content_thinking|>", "<|content_text|>"
_END = "<|end_message|>"
_SPACE = Pattern(" ?", "")  # the templates write none, models sometimes do


def parse(body: str, tools: ToolsByName) -> list[ParsedCall]:
    value = loads(body)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("a call needs a name")
    return [call_with(value["name"], value.get("args"))]


def call_grammar(tool: Tool) -> CallGrammar:
    name = (f'{_CALL}{{"name":', _SPACE, f"{dumps(tool.name)},", _SPACE, '"args":', _SPACE)
    return (*name, arguments_of(tool), f"}}{_END}")


def message_kind(header: str) -> MessageKind:
    if header.endswith(_CALL):
        return "calls"
    return "reasoning" if header.endswith(_THINKING) else "text"


FORMAT = ToolFormat(
    name="inkling",
    template_pattern=re.compile(re.escape(_CALL)),
    region=Region(opening=(_CALL,), closing=(_END,), is_open=ends_in_string),
    parse=parse,
    call_grammar=call_grammar,
    between="<|message_model|>",
    header=header("args"),
    stops=("<|content_model_end_sampling|>",),
)
REASONING = ReasoningFormat(
    name="inkling",
    template_pattern=re.compile(re.escape(_THINKING)),
    opening=_THINKING,
    closing=_END,
    answer=_TEXT,
    framing=Framing(
        starts=("<|message_model|>",),
        contents=(_TEXT, _THINKING, _CALL, "<|content_invoke_tool_text|>", "<|content_tool_error|>"),
        ends=(_END, "<|content_model_end_sampling|>"),
        kind=message_kind,
        next_message="<|message_model|>",
        recipient="",
        reasoning_name=_THINKING,
    ),
)
