"""Kimi K2: a numbered name, which is also the call's id, then JSON.

<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0
<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

import re

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar, Pattern
from outrider.chat.formats.json_calls import arguments_of, call_with
from outrider.chat.formats.tool_format import ParsedCall, Region, ToolFormat, ToolsByName
from outrider.chat.json_text import ends_in_string, loads

NUMBER = Pattern("[0-9]{1,4}", "0")  # of the call in the conversation: a grammar cannot count
_HEADER = re.compile(
    r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<]+?):\d{1,9})\s*<\|tool_call_argument_begin\|>\s*"
)


def parse(body: str, tools: ToolsByName) -> list[ParsedCall]:
    named = _HEADER.match(body)
    if named is None:
        raise ValueError("a call needs a numbered name")
    return [call_with(named["name"], loads(body[named.end() :]), named["id"])]


def call_grammar(tool: Tool) -> CallGrammar:
    before = f"<|tool_call_begin|>functions.{tool.name}:"
    return (before, NUMBER, "<|tool_call_argument_begin|>", arguments_of(tool), "<|tool_call_end|>")


FORMAT = ToolFormat(
    name="kimi",
    template_pattern=re.compile(r"<\|tool_calls_section_begin\|>"),
    region=Region(
        before=("<|tool_calls_section_begin|>",),
        opening=("<|tool_call_begin|>",),
        closing=("<|tool_call_end|>",),
        after=("<|tool_calls_section_end|>",),
        inner=("<|tool_call_argument_begin|>",),
        is_open=ends_in_string,
    ),
    parse=parse,
    call_grammar=call_grammar,
    around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    between="",
)
