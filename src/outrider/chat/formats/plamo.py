"""PLaMo 3: name and JSON arguments, each between markers of its own.

<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|>
<|plamo:begin_tool_name:plamo|>f<|plamo:end_tool_name:plamo|>
<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{"a": 1}
<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>
<|plamo:end_tool_requests:plamo|>     (without the line breaks)
"""

from __future__ import annotations

import re

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar
from outrider.chat.formats.json_calls import arguments_of, call_after
from outrider.chat.formats.reasoning_format import ReasoningFormat
from outrider.chat.formats.tool_format import ParsedCall, Region, ToolFormat, ToolsByName
from outrider.chat.json_text import ends_in_string


def _begin(part: str) -> str:
    return f"<|plamo:begin_{part}:plamo|>"


def _end(part: str) -> str:
    return f"<|plamo:end_{part}:plamo|>"


_ARGUMENTS = f"{_begin('tool_arguments')}<|plamo:constrain|>json<|plamo:msg|>"
_HEADER = re.compile(
    rf"\s*{re.escape(_begin('tool_name'))}\s*(?P<name>[^\s<]+)\s*{re.escape(_end('tool_name'))}"
    rf"\s*{re.escape(_ARGUMENTS)}\s*(?=\{{)"
)
_TAIL = re.compile(rf"\s*(?:{re.escape(_end('tool_arguments'))})?\s*")


def parse(body: str, tools: ToolsByName) -> list[ParsedCall]:
    return [call_after(_HEADER, body, _TAIL)]


def call_grammar(tool: Tool) -> CallGrammar:
    name = f"{_begin('tool_name')}{tool.name}{_end('tool_name')}"
    end = _end("tool_arguments") + _end("tool_request")
    return (f"{_begin('tool_request')}{name}{_ARGUMENTS}", arguments_of(tool), end)


FORMAT = ToolFormat(
    name="plamo3",
    template_pattern=re.compile(re.escape(_begin("tool_request"))),
    region=Region(
        before=(_begin("tool_requests"),),
        opening=(_begin("tool_request"),),
        closing=(_end("tool_request"),),
        after=(_end("tool_requests"),),
        inner=(_begin("tool_name"), _end("tool_name"), _ARGUMENTS, _end("tool_arguments")),
        is_open=ends_in_string,
    ),
    parse=parse,
    call_grammar=call_grammar,
    around=(_begin("tool_requests"), _end("tool_requests")),
    between="",
    header=_HEADER,
)
REASONING = ReasoningFormat("plamo3", re.compile(re.escape(_begin("think"))), _begin("think"), _end("think"))
