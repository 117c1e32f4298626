"""MiniMax M3: elements, each tag after a marker of its own. Objects and lists are nested elements.

]<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">]<]minimax[>[<a>1]<]minimax[>[</a>
]<]minimax[>[</invoke>]<]minimax[>[</tool_call>     (without the line break)
"""

from __future__ import annotations

import re
from typing import Any

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar
from outrider.chat.formats.json_calls import call_with
from outrider.chat.formats.tool_format import ParsedCall, Region, ToolFormat, ToolsByName
from outrider.chat.formats.typed_values import (
    allows,
    arguments_and_end,
    item_schema,
    member_schema,
    typed_value,
)
from outrider.chat.json_text import MAX_DEPTH

MARK = "]<]minimax[>["
_AROUND = (f"{MARK}<tool_call>", f"{MARK}</tool_call>")
_NAME = re.compile(r'\s*"([^"]+)"\s*>\s*')
_TAG = re.compile(rf"{re.escape(MARK)}<(/?)([A-Za-z_$][\w:.$-]*)>")


def parse(body: str, tools: ToolsByName) -> list[ParsedCall]:
    name = _NAME.match(body)
    if name is None:
        raise ValueError("a call needs a name")
    tool = tools.get(name[1])
    schema = tool.parameters if tool is not None else {}
    return [call_with(name[1], _object(_elements(body, name.end()), schema))]


Element = tuple[str, "str | list[Any]"]  # a tag, and its text or the elements in it


def _elements(body: str, at: int) -> list[Element]:
    """All elements from here to the end of the body."""
    found = []
    while body[at:].strip():
        element, at = _element(body, at, 0)
        found.append(element)
    return found


def _element(body: str, at: int, depth: int) -> tuple[Element, int]:
    """The element that starts here, and where it ends. Raises ValueError where tags do not match."""
    start = _TAG.search(body, at)
    if start is None or start[1] or body[at : start.start()].strip() or depth > MAX_DEPTH:
        raise ValueError("an argument must be an element")
    tag, at = start[2], start.end()
    members: list[Element] = []
    while mark := _TAG.search(body, at):
        if mark[1] and mark[2] == tag:
            content = members or body[start.end() : mark.start()]
            return (tag, content), mark.end()
        member, at = _element(body, at, depth + 1)
        members.append(member)
    raise ValueError(f"{tag!r} is not closed")


def _object(members: list[Element], schema: Any) -> dict[str, Any]:
    """Elements of the same tag are a list."""
    found: dict[str, Any] = {}
    for tag in dict.fromkeys(tag for tag, _ in members):
        values = [_value(content, member_schema(schema, tag)) for name, content in members if name == tag]
        found[tag] = values[0] if len(values) == 1 else values
    return found


def _value(content: str | list[Any], schema: Any) -> Any:
    if isinstance(content, str):
        return typed_value(schema, content)
    has_items = all(tag == "item" for tag, _ in content)
    if allows(schema, "array") or (has_items and not allows(schema, "object")):
        return [_value(inner, item_schema(schema)) for _, inner in content]
    return _object(content, schema)


def is_open(body: str) -> bool:
    """True inside an argument."""
    tags = _TAG.findall(body)
    return sum(-1 if closes else 1 for closes, _ in tags) > 0


def call_grammar(tool: Tool) -> CallGrammar:
    """Objects and lists are written as JSON, which is read as well."""
    arguments = arguments_and_end(tool, ([f"{MARK}<{{}}>"], f"{MARK}</{{}}>"), f"{MARK}</invoke>")
    return (f'{MARK}<invoke name="{tool.name}">', *arguments)


FORMAT = ToolFormat(
    name="minimax_m3",
    template_pattern=re.compile(rf"{re.escape(MARK)}<tool_call>|<mm:think>"),
    region=Region(
        before=_AROUND[:1],
        opening=(f"{MARK}<invoke name=",),
        closing=(f"{MARK}</invoke>",),
        after=_AROUND[1:],
        inner=(MARK,),
        is_open=is_open,
    ),
    parse=parse,
    call_grammar=call_grammar,
    around=_AROUND,
    between="",
)
