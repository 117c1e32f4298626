"""Mistral: a marker, then a JSON list (older templates), or a name, "[ARGS]" and JSON (newer ones).

[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]
[TOOL_CALLS]f[ARGS]{"a": 1}
"""

from __future__ import annotations

import re

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar, Pattern
from outrider.chat.formats.json_calls import arguments_of, call_with, calls_from, listed_call
from outrider.chat.formats.tool_format import ParsedCall, Region, ToolFormat, ToolsByName
from outrider.chat.json_text import loads

_HEADER = re.compile(r"\s*(?P<name>[\w.\-]{1,128})\s*(?:\[CALL_ID\]\s*[\w.\-]{1,128}\s*)?\[ARGS\]\s*(?=\{)")
_REGION = Region(
    opening=("[TOOL_CALLS]",),
    inner=("[CALL_ID]", "[ARGS]"),
    value_start=re.compile(rf"{_HEADER.pattern}|\s*(?=[\[{{])"),
)


def parse(body: str, tools: ToolsByName) -> list[ParsedCall]:
    if named := _HEADER.match(body):
        return [call_with(named["name"], loads(body[named.end() :]))]
    return calls_from(loads(body))


def call_grammar(tool: Tool) -> CallGrammar:
    return (f"[TOOL_CALLS]{tool.name}[ARGS]", arguments_of(tool))


FORMAT = ToolFormat(
    name="mistral",
    template_pattern=re.compile(r"(?s)(?=.*\[TOOL_CALLS\]).*\[ARGS\]"),
    region=_REGION,
    parse=parse,
    call_grammar=call_grammar,
    between="",
    header=_HEADER,
)
LISTED = ToolFormat(
    name="mistral_list",
    template_pattern=re.compile(r"\[TOOL_CALLS\]"),
    region=_REGION,
    parse=parse,
    call_grammar=listed_call,
    around=(("[TOOL_CALLS]", Pattern(" ?", ""), "["), "]"),
    between=", ",
)
