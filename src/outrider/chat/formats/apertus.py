"""Apertus: a JSON list of objects, each with one key, the name of the tool.

<|tools_prefix|>[{"f": {"a": 1}}]<|tools_suffix|>
"""

from __future__ import annotations

import re

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar
from outrider.chat.formats.json_calls import arguments_of, call_with
from outrider.chat.formats.tool_format import ParsedCall, Region, ToolFormat, ToolsByName
from outrider.chat.json_text import dumps, ends_in_string, loads


def parse(body: str, tools: ToolsByName) -> list[ParsedCall]:
    value = loads(body)
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) and len(call) == 1 for call in calls):
        raise ValueError("a call needs an object with one key")
    return [call_with(name, arguments) for call in calls for name, arguments in call.items()]


def call_grammar(tool: Tool) -> CallGrammar:
    return (f"{{{dumps(tool.name)}: ", arguments_of(tool), "}")


FORMAT = ToolFormat(
    name="apertus",
    template_pattern=re.compile(r"<\|tools_prefix\|>"),
    region=Region(opening=("<|tools_prefix|>",), closing=("<|tools_suffix|>",), is_open=ends_in_string),
    parse=parse,
    call_grammar=call_grammar,
    around=("<|tools_prefix|>[", "]<|tools_suffix|>"),
    between=", ",
)
