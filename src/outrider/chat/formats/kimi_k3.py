"""Kimi K3: tags of special tokens. Arguments are written one by one with their types, or as one JSON object.

<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1
<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>     (without the line break)
"""

from __future__ import annotations

import re
from typing import Any

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar, OneOf, Pattern, RequiredElement
from outrider.chat.formats.json_calls import call_with
from outrider.chat.formats.reasoning_format import ReasoningFormat
from outrider.chat.formats.tool_format import ParsedCall, Region, ToolFormat, ToolsByName
from outrider.chat.formats.typed_values import ArgumentTags, arguments_and_end, covering, is_text
from outrider.chat.json_text import loads

_AROUND = ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>")
_CALL_END = "<|close|>call<|sep|>"
_ATTRIBUTES = re.compile(r'\s*tool="(?P<tool>[^"]+)"(?:\s+index="\d{1,9}")?\s*<\|sep\|>\s*')
_ARGUMENT = re.compile(
    r'<\|open\|>argument key="([^"]*)"(?: type="(\w+)")?<\|sep\|>(.*?)<\|close\|>argument<\|sep\|>\s*',
    re.DOTALL,
)
_OBJECT = re.compile(r"<\|open\|>json[^<]*<\|sep\|>(.*?)<\|close\|>json<\|sep\|>\s*", re.DOTALL)
_TYPES = OneOf(("number", "boolean", "null", "object", "array"))


def parse(body: str, tools: ToolsByName) -> list[ParsedCall]:
    start = _ATTRIBUTES.match(body)
    if start is None:
        raise ValueError("a call needs a tool")
    name, rest = _unescaped(start["tool"]), body[start.end() :]
    if whole := _OBJECT.fullmatch(rest):
        return [call_with(name, loads(whole[1]))]
    found = covering(_ARGUMENT, rest)
    return [
        call_with(name, {_unescaped(m[1]): m[3] if m[2] in (None, "string") else loads(m[3]) for m in found})
    ]


def _unescaped(attribute: str) -> str:
    return attribute.replace("&quot;", '"').replace("&amp;", "&")


def is_open(body: str) -> bool:
    return any(body.rfind(f"<|open|>{tag}") > body.rfind(f"<|close|>{tag}") for tag in ("argument", "json"))


def _tags(schema: Any) -> ArgumentTags:
    kind: list[RequiredElement] = ['string"'] if is_text(schema) else [_TYPES, '"']
    return ['<|open|>argument key="{}" type="', *kind, "<|sep|>"], "<|close|>argument<|sep|>"


def call_grammar(tool: Tool) -> CallGrammar:
    before = f'<|open|>call tool="{tool.name}" index="'
    arguments = arguments_and_end(tool, _tags, _CALL_END)
    return (before, Pattern("[0-9]{1,4}", "1"), '"<|sep|>', *arguments)


FORMAT = ToolFormat(
    name="kimi_k3",
    template_pattern=re.compile(r"(?s)(?=.*<\|open\|>)(?=.*<\|close\|>).*<\|end_of_msg\|>"),
    region=Region(
        before=_AROUND[:1],
        opening=("<|open|>call",),
        closing=(_CALL_END,),
        after=_AROUND[1:],
        is_open=is_open,
    ),
    parse=parse,
    call_grammar=call_grammar,
    around=_AROUND,
    between="",
)
REASONING = ReasoningFormat(
    "kimi_k3",
    FORMAT.template_pattern,
    "<|open|>think<|sep|>",
    "<|close|>think<|sep|>",
    layout=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
)
