"""Llama 3.1 and later: the whole answer is a JSON object, sometimes after a marker; ";" separates several.

<|python_tag|>{"name": "f", "parameters": {"a": 1}}
"""

from __future__ import annotations

import re

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar
from outrider.chat.formats.json_calls import arguments_of, header, parse_json_calls
from outrider.chat.formats.tool_format import Region, ToolFormat
from outrider.chat.json_text import dumps


def call_grammar(tool: Tool) -> CallGrammar:
    return (f'{{"name": {dumps(tool.name)}, "parameters": ', arguments_of(tool), "}")


FORMAT = ToolFormat(
    name="llama3",
    template_pattern=re.compile(r'<\|python_tag\|>|function name, \\?"parameters\\?"'),
    region=Region(
        before=("<|python_tag|>",),
        opening=("{",),
        after=(";",),
        value_start=re.compile(r"\s*(?=\{)"),
        opens_answer_only=True,
        keeps_opening=True,
    ),
    parse=parse_json_calls,
    call_grammar=call_grammar,
    between="; ",
    header=header("parameters"),
)
