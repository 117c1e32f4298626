"""DeepSeek V3 and R1 (JSON in a fence after the name), V3.1 (JSON right after the name).

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

import re

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar
from outrider.chat.formats.json_calls import arguments_of, call_after
from outrider.chat.formats.tool_format import ParsedCall, Region, ToolFormat, ToolsByName
from outrider.chat.json_text import ends_in_string

_HEADER = re.compile(
    r"\s*(?:function<｜tool▁sep｜>)?(?P<name>[^\s<{]+)\s*(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*(?=\{)"
)
_TAIL = re.compile(r"\s*(?:```)?\s*")
_AROUND = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_REGION = Region(
    before=_AROUND[:1],
    opening=("<｜tool▁call▁begin｜>",),
    closing=("<｜tool▁call▁end｜>",),
    after=_AROUND[1:],
    inner=("<｜tool▁sep｜>",),
    is_open=ends_in_string,
)


def parse(body: str, tools: ToolsByName) -> list[ParsedCall]:
    return [call_after(_HEADER, body, _TAIL)]


def call_grammar(tool: Tool) -> CallGrammar:
    return (f"<｜tool▁call▁begin｜>{tool.name}<｜tool▁sep｜>", arguments_of(tool), "<｜tool▁call▁end｜>")


def fenced_grammar(tool: Tool) -> CallGrammar:
    before = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{tool.name}\n```json\n"
    return (before, arguments_of(tool), "\n```<｜tool▁call▁end｜>")


FORMAT = ToolFormat(
    name="deepseek",
    template_pattern=re.compile("<｜tool▁call▁begin｜>"),
    region=_REGION,
    parse=parse,
    call_grammar=call_grammar,
    around=_AROUND,
    between="",
    header=_HEADER,
)
FENCED = ToolFormat(
    name="deepseek_v3",
    template_pattern=re.compile("(?s)(?=.*<｜tool▁call▁begin｜>).*```json"),
    region=_REGION,
    parse=parse,
    call_grammar=fenced_grammar,
    around=_AROUND,
    header=_HEADER,
)
