"""Hermes, Qwen 2.5 and 3, and many others: JSON between tags.

<tool_call>
{"name": "f", "arguments": {"a": 1}}
</tool_call>
"""

from __future__ import annotations

import re

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar
from outrider.chat.formats.json_calls import arguments_of, header, parse_json_calls
from outrider.chat.formats.tool_format import Region, ToolFormat
from outrider.chat.json_text import dumps, ends_in_string


def call_grammar(tool: Tool) -> CallGrammar:
    before = f'<tool_call>\n{{"name": {dumps(tool.name)}, "arguments": '
    return (before, arguments_of(tool), "}\n</tool_call>")


FORMAT = ToolFormat(
    name="hermes",
    template_pattern=re.compile("<tool_call>"),
    region=Region(opening=("<tool_call>",), closing=("</tool_call>",), is_open=ends_in_string),
    parse=parse_json_calls,
    call_grammar=call_grammar,
    header=header("arguments"),
    instructions=(
        "To call a function, write its name and arguments as JSON between <tool_call> tags, like this:\n"
        '<tool_call>\n{"name": "a_function", "arguments": {"an_argument": "its value"}}\n</tool_call>'
    ),
)
