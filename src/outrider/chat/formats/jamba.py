"""Jamba and Hunyuan A13B: a JSON list between tags. MiniMax M1: a JSON object in each line between the tags.

<tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>
"""

from __future__ import annotations

import re

from outrider.chat.formats.json_calls import calls_from, listed_call
from outrider.chat.formats.tool_format import (
    BY_NAME_ONLY,
    ParsedCall,
    Region,
    ToolFormat,
    ToolsByName,
)
from outrider.chat.json_text import ends_in_string, loads

_REGION = Region(opening=("<tool_calls>",), closing=("</tool_calls>",), is_open=ends_in_string)


def parse(body: str, tools: ToolsByName) -> list[ParsedCall]:
    if body.lstrip().startswith("["):
        return calls_from(loads(body))
    lines = [line for line in body.splitlines() if line.strip()]
    if not lines:
        raise ValueError("a region needs a call")
    return [call for line in lines for call in calls_from(loads(line))]


FORMAT = ToolFormat(
    name="jamba",
    template_pattern=re.compile("<tool_calls>"),
    region=_REGION,
    parse=parse,
    call_grammar=listed_call,
    around=("<tool_calls>[", "]</tool_calls>"),
    between=", ",
)
MINIMAX_M1 = ToolFormat(
    name="minimax_m1",
    template_pattern=BY_NAME_ONLY,  # templates of Jamba and M1 look alike
    region=_REGION,
    parse=parse,
    call_grammar=listed_call,
    around=("<tool_calls>\n", "\n</tool_calls>"),
)
