"""GigaChat 3: a message of its own role, whose content is JSON.

function call<|role_sep|>
{"name": "f", "arguments": {"a": 1}}
"""

from __future__ import annotations

import re

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar
from outrider.chat.formats.json_calls import header, listed_call, parse_json_calls
from outrider.chat.formats.tool_format import Region, ToolFormat

_OPENING = "function call<|role_sep|>"


def call_grammar(tool: Tool) -> CallGrammar:
    return (f"{_OPENING}\n", *listed_call(tool))


FORMAT = ToolFormat(
    name="gigachat3",
    template_pattern=re.compile(r"(?s)(?=.*function call).*<\|role_sep\|>"),
    region=Region(opening=(_OPENING,), value_start=re.compile(r"\s*(?=\{)")),
    parse=parse_json_calls,
    call_grammar=call_grammar,
    header=header("arguments"),
    is_single=True,
)
