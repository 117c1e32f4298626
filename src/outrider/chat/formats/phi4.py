"""Phi 4 Mini, and FireFunction 2: a word, then a JSON list.

functools[{"name": "f", "arguments": {"a": 1}}]
"""

from __future__ import annotations

import re

from outrider.chat.formats.json_calls import listed_call, parse_json_calls
from outrider.chat.formats.tool_format import Region, ToolFormat

FORMAT = ToolFormat(
    name="phi4_mini",
    template_pattern=re.compile(r"functools\["),
    region=Region(opening=("functools[",), value_start=re.compile(r"functools(?=\[)"), keeps_opening=True),
    parse=lambda body, tools: parse_json_calls(body.removeprefix("functools"), tools),
    call_grammar=listed_call,
    around=("functools[", "]"),
    between=", ",
)
