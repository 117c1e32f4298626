"""xLAM 2: the whole answer is a JSON list of calls.

[{"name": "f", "arguments": {"a": 1}}]
"""

from __future__ import annotations

import re

from outrider.chat.formats.json_calls import listed_call, parse_json_calls
from outrider.chat.formats.tool_format import BY_NAME_ONLY, Region, ToolFormat

FORMAT = ToolFormat(
    name="xlam",
    template_pattern=BY_NAME_ONLY,
    region=Region(
        opening=("[",),
        value_start=re.compile(r"\s*(?=\[)"),
        opens_answer_only=True,
        keeps_opening=True,
    ),
    parse=parse_json_calls,
    call_grammar=listed_call,
    around=("[", "]"),
    between=", ",
)
