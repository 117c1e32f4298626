"""Llama 3.1 and later: the whole answer is a JSON object, sometimes after a marker, several with ";" between.

<|python_tag|>{"name": "f", "parameters": {"a": 1}}
"""

from __future__ import annotations

import re

from outrider.chat.conversation import Tool
from outrider.chat.formats.json_calls import arguments_of, calls_from, header
from outrider.chat.formats.shape import Shape
from outrider.chat.formats.tool_format import ParsedCall, Region, Toolbox, ToolFormat
from outrider.chat.json_text import dumps, loads


def parse(body: str, tools: Toolbox) -> list[ParsedCall]:
    return calls_from(loads(body))


def shape(tool: Tool) -> Shape:
    return (f'{{"name": {dumps(tool.name)}, "parameters": ', arguments_of(tool), "}")


FORMAT = ToolFormat(
    name="llama3",
    sign=re.compile(r'<\|python_tag\|>|function name, \\?"parameters\\?"'),
    region=Region(
        before=("<|python_tag|>",),
        opening=("{",),
        after=(";",),
        value_start=re.compile(r"\s*(?=\{)"),
        opens_answer_only=True,
        keeps_opening=True,
    ),
    parse=parse,
    shape=shape,
    between="; ",
    header=header("parameters"),
)
