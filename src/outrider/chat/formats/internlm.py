"""InternLM 2.5 and 3: JSON between markers.

<|action_start|><|plugin|>{"name": "f", "parameters": {"a": 1}}<|action_end|>
"""

from __future__ import annotations

import re

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar
from outrider.chat.formats.json_calls import header, listed_call, parse_json_calls
from outrider.chat.formats.tool_format import Region, ToolFormat
from outrider.chat.json_text import ends_in_string

_OPENING = "<|action_start|><|plugin|>"


def call_grammar(tool: Tool) -> CallGrammar:
    return (_OPENING, *listed_call(tool, arguments_key="parameters"), "<|action_end|>")


FORMAT = ToolFormat(
    name="internlm",
    template_pattern=re.compile(r"<\|plugin\|>"),
    region=Region(
        opening=(_OPENING,),
        closing=("<|action_end|>",),
        is_open=ends_in_string,
    ),
    parse=parse_json_calls,
    call_grammar=call_grammar,
    header=header("parameters"),
)
