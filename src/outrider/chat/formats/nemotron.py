"""Nemotron Nano 2 and Llama-Nemotron: a JSON list between tags.

<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>
"""

from __future__ import annotations

import re

from outrider.chat.formats.json_calls import listed_call, parse_json_calls
from outrider.chat.formats.tool_format import Region, ToolFormat
from outrider.chat.json_text import ends_in_string

FORMAT = ToolFormat(
    name="nemotron",
    template_pattern=re.compile("<TOOLCALL>"),
    region=Region(opening=("<TOOLCALL>",), closing=("</TOOLCALL>",), is_open=ends_in_string),
    parse=parse_json_calls,
    call_grammar=listed_call,
    around=("<TOOLCALL>[", "]</TOOLCALL>"),
    between=", ",
)
