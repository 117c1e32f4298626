"""Granite 3: a marker, then a JSON list. Granite 20B Function Calling: a marker before each JSON object.

<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]
<function_call> {"name": "f", "arguments": {"a": 1}}

Granite 4 writes Hermes calls.
"""

from __future__ import annotations

import re

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar
from outrider.chat.formats.json_calls import header, listed_call, parse_json_calls
from outrider.chat.formats.tool_format import Region, ToolFormat

_VALUE = re.compile(r"\s*(?=[\[{])")


def marked_call(tool: Tool) -> CallGrammar:
    return ("<function_call> ", *listed_call(tool))


FORMAT = ToolFormat(
    name="granite",
    template_pattern=re.compile(r"<\|tool_call\|>"),
    region=Region(opening=("<|tool_call|>",), value_start=_VALUE),
    parse=parse_json_calls,
    call_grammar=listed_call,
    around=("<|tool_call|>[", "]"),
    between=", ",
)
GRANITE_20B = ToolFormat(
    name="granite_20b_fc",
    template_pattern=re.compile("<function_call>"),
    region=Region(opening=("<function_call>",), value_start=_VALUE),
    parse=parse_json_calls,
    call_grammar=marked_call,
    header=header("arguments"),
)
