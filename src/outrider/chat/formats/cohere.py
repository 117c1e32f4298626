"""Command A and Command R7B: a JSON list between markers, with keys of its own.

<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}]<|END_ACTION|>
"""

from __future__ import annotations

import re

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar, Pattern
from outrider.chat.formats.json_calls import arguments_of, parse_json_calls
from outrider.chat.formats.tool_format import Region, ToolFormat
from outrider.chat.json_text import dumps, ends_in_string

# Between the elements of the list: the templates put each element on a line of its own, with an indent.
_BLANK = Pattern(r"[ \n]{0,9}", "\n    ")
_NUMBER = Pattern("[0-9]{1,4}", "0")


def call_grammar(tool: Tool) -> CallGrammar:
    before = f'", "tool_name": {dumps(tool.name)}, "parameters": '
    return (_BLANK, '{"tool_call_id": "', _NUMBER, before, arguments_of(tool), "}", _BLANK)


FORMAT = ToolFormat(
    name="cohere",
    template_pattern=re.compile(r"<\|START_ACTION\|>"),
    region=Region(opening=("<|START_ACTION|>",), closing=("<|END_ACTION|>",), is_open=ends_in_string),
    parse=parse_json_calls,
    call_grammar=call_grammar,
    around=("<|START_ACTION|>[", "]<|END_ACTION|>"),
    between=",",
)
