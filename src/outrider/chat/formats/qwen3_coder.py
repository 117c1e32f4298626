"""Qwen 3 Coder, Qwen 3.5 and later, MiMo V2: tags that contain the names. Models often omit the outer tags.

<tool_call>
<function=f>
<parameter=a>
1
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar
from outrider.chat.formats.json_calls import call_with
from outrider.chat.formats.tool_format import ParsedCall, Region, ToolFormat, ToolsByName
from outrider.chat.formats.typed_values import arguments_and_end, covering, typed

_NAME = re.compile(r"\s*([^\s<>]+)\s*>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def parse(body: str, tools: ToolsByName) -> list[ParsedCall]:
    name = _NAME.match(body)
    if name is None:
        raise ValueError("a call needs a name")
    tool = tools.get(name[1])
    found = covering(_PARAMETER, body[name.end() :])
    return [call_with(name[1], {match[1]: typed(tool, match[1], match[2]) for match in found})]


def is_open(body: str) -> bool:
    return body.rfind("<parameter=") > body.rfind("</parameter>")


def call_grammar(tool: Tool) -> CallGrammar:
    arguments = arguments_and_end(tool, (["<parameter={}>\n"], "\n</parameter>\n"), "</function>")
    return (f"<function={tool.name}>\n", *arguments)


FORMAT = ToolFormat(
    name="qwen3_coder",
    template_pattern=re.compile("<function="),
    region=Region(
        before=("<tool_call>",),
        opening=("<function=",),
        closing=("</function>",),
        after=("</tool_call>",),
        inner=("<parameter=", "</parameter>"),
        is_open=is_open,
    ),
    parse=parse,
    call_grammar=call_grammar,
    tags=("<tool_call>\n", "\n</tool_call>"),
)
