"""Kimi K2: a numbered name, which is the call's id too, then JSON.

<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0
<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

import re

from outrider.chat.conversation import Tool
from outrider.chat.formats.json_calls import arguments_of, call_with
from outrider.chat.formats.shape import Shape
from outrider.chat.formats.tool_format import ParsedCall, Region, Toolbox, ToolFormat
from outrider.chat.json_text import ends_in_string, loads

_HEADER = re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<]+?):\d+)\s*<\|tool_call_argument_begin\|>\s*")


def parse(body: str, tools: Toolbox) -> list[ParsedCall]:
    named = _HEADER.match(body)
    if named is None:
        raise ValueError("a call needs a numbered name")
    return [call_with(named["name"], loads(body[named.end() :]), named["id"])]


def shape(tool: Tool) -> Shape:
    before = f"<|tool_call_begin|>functions.{tool.name}:0<|tool_call_argument_begin|>"
    return (before, arguments_of(tool), "<|tool_call_end|>")


FORMAT = ToolFormat(
    name="kimi",
    sign=re.compile(r"<\|tool_calls_section_begin\|>"),
    region=Region(
        before=("<|tool_calls_section_begin|>",),
        opening=("<|tool_call_begin|>",),
        closing=("<|tool_call_end|>",),
        after=("<|tool_calls_section_end|>",),
        inner=("<|tool_call_argument_begin|>",),
        is_open=ends_in_string,
    ),
    parse=parse,
    shape=shape,
    around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    is_single=True,  # the number in the name would have to count
)
