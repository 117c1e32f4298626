"""MiniCPM 5: XML. Values with markup or line breaks are CDATA. Several calls follow one another.

<function name="f"><param name="a">1</param></function>
"""

from __future__ import annotations

import re
from typing import Any
from xml.sax.saxutils import unescape

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar
from outrider.chat.formats.json_calls import call_with
from outrider.chat.formats.tool_format import ParsedCall, Region, ToolFormat, ToolsByName
from outrider.chat.formats.typed_values import ArgumentTags, arguments_and_end, covering, is_text, typed

_NAME = re.compile(r'\s*"([^"]+)"\s*>\s*')
_CDATA = re.compile(r"<!\[CDATA\[(.*?)\]\]>", re.DOTALL)
_PARAMETER = re.compile(
    r'<param name="([^"]+)"\s*>(?:\s*<!\[CDATA\[(.*?)\]\]>\s*|(.*?))</param>\s*', re.DOTALL
)
_ENTITIES = {"&quot;": '"', "&apos;": "'"}


def parse(body: str, tools: ToolsByName) -> list[ParsedCall]:
    name = _NAME.match(body)
    if name is None:
        raise ValueError("a call needs a name")
    tool = tools.get(name[1])
    found = covering(_PARAMETER, body[name.end() :])
    return [call_with(name[1], {match[1]: typed(tool, match[1], _text(match)) for match in found})]


def _text(parameter: re.Match[str]) -> str:
    if parameter[2] is not None:
        return parameter[2]
    return unescape(parameter[3].strip(), _ENTITIES)


def is_open(body: str) -> bool:
    body = _CDATA.sub("", body)
    return body.rfind("<param ") > body.rfind("</param>") or "<![CDATA[" in body


def _tags(schema: Any) -> ArgumentTags:
    if is_text(schema):
        return ['<param name="{}"><![CDATA['], "]]></param>"
    return ['<param name="{}">'], "</param>"


def call_grammar(tool: Tool) -> CallGrammar:
    """Strings are CDATA: whatever they contain, they can be read back."""
    arguments = arguments_and_end(tool, _tags, "</function>")
    return (f'<function name="{tool.name}">', *arguments)


FORMAT = ToolFormat(
    name="minicpm5",
    template_pattern=re.compile(r'(?s)(?=.*<function name=\\?").*<param name=\\?"'),
    region=Region(
        opening=("<function name=",),
        closing=("</function>",),
        inner=("<param name=", "</param>"),
        is_open=is_open,
    ),
    parse=parse,
    call_grammar=call_grammar,
)
