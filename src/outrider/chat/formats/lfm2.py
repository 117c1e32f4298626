"""LFM 2: Python calls in a list between markers.

<|tool_call_start|>[f(a=1)]<|tool_call_end|>
"""

from __future__ import annotations

import re

from outrider.chat.formats.json_calls import calls_from
from outrider.chat.formats.python_calls import call_elements, python_calls
from outrider.chat.formats.tool_format import ParsedCall, Region, ToolFormat, ToolsByName
from outrider.chat.json_text import loads


def parse(body: str, tools: ToolsByName) -> list[ParsedCall]:
    if body.lstrip().startswith(("{", "[{")):
        return calls_from(loads(body))
    return python_calls(body)


FORMAT = ToolFormat(
    name="lfm2",
    template_pattern=re.compile(r"<\|tool_(?:call|list)_start\|>"),
    region=Region(opening=("<|tool_call_start|>",), closing=("<|tool_call_end|>",)),
    parse=parse,
    call_grammar=call_elements,
    around=("<|tool_call_start|>[", "]<|tool_call_end|>"),
    between=", ",
)
