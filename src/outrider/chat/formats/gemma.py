"""Gemma. Version 4 and FunctionGemma have their own notation; version 3 was trained on fenced Python.

<|tool_call>call:f{a:1,b:<|"|>text<|"|>}<tool_call|>
<start_function_call>call:f{a:1,b:<escape>text<escape>}<end_function_call>
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import (
    CallGrammar,
    FreeText,
    JsonValue,
    OneOf,
    Repeated,
    RequiredElement,
    Separated,
)
from outrider.chat.formats.json_calls import arguments_of, call_with, calls_from
from outrider.chat.formats.python_calls import call_line, python_calls
from outrider.chat.formats.tool_format import ParsedCall, Region, ToolFormat, ToolsByName
from outrider.chat.formats.typed_values import has_fixed_arguments, is_text, properties_of
from outrider.chat.json_text import dumps, loads

_CALL = re.compile(r"\s*call:([\w.\-]+)\s*(\{.*\})\s*", re.DOTALL)
_BARE_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:")
_NONE = re.compile(r"\bNone\b")
_BARE_NAME = re.compile(r"[\w.\-]+")
_QUOTE = '<|"|>'


def parse(quote: str, body: str, tools: ToolsByName) -> list[ParsedCall]:
    call = _CALL.fullmatch(body)
    if call is None:
        raise ValueError("a call needs a name and braces")
    chunks = call[2].split(quote)  # every second chunk is a string
    if len(chunks) % 2 == 0:
        raise ValueError("a string is not closed")
    # The text between strings has bare keys, numbers, brackets, and Python's None.
    written = [
        dumps(chunk) if i % 2 else _NONE.sub("null", _BARE_KEY.sub(r'\1"\2":', chunk))
        for i, chunk in enumerate(chunks)
    ]
    return [call_with(call[1], loads("".join(written)))]


def call_grammar(quote: str, opening: str, closing: str, tool: Tool) -> CallGrammar:
    """Arguments whose schema this notation cannot express are any text up to the end of the call."""
    schema = arguments_of(tool)
    arguments = _members(quote, properties_of(schema)) if has_fixed_arguments(schema) else None
    if arguments is None:
        return (f"{opening}call:{tool.name}{{", FreeText(f"}}{closing}"))
    return (f"{opening}call:{tool.name}{{", arguments, f"}}{closing}")


def _members(quote: str, properties: Iterable[tuple[str, Any, bool]]) -> Separated | None:
    items = []
    for name, schema, is_required in properties:
        value = _value(quote, schema)
        if value is None or not _BARE_NAME.fullmatch(name):
            return None
        items.append(((f"{name}:", *value), is_required))
    return Separated(tuple(items), ",")


def _value(quote: str, schema: Any) -> tuple[RequiredElement, ...] | None:
    """The elements of a value: None if its schema does not say what it is made of."""
    if is_text(schema):
        choices = [choice for choice in schema.get("enum") or () if isinstance(choice, str)]
        return (quote, OneOf(tuple(choices)), quote) if choices else (quote, FreeText(quote))
    if isinstance(schema, Mapping) and schema.get("type") in ("integer", "number", "boolean", "null"):
        return (JsonValue(schema, is_strict=False),)
    if isinstance(schema, Mapping) and schema.get("type") == "array":
        item = _value(quote, schema.get("items"))
        return None if item is None else ("[", Repeated(item, ","), "]")
    return None


def is_open(quote: str, body: str) -> bool:
    return body.count(quote) % 2 == 1


def parse_fenced(body: str, tools: ToolsByName) -> list[ParsedCall]:
    if body.lstrip().startswith("{"):
        return calls_from(loads(body))
    return python_calls(body)


GEMMA4 = ToolFormat(
    name="gemma4",
    template_pattern=re.compile(r"<\|tool_call>"),
    region=Region(
        opening=("<|tool_call>",),
        closing=("<tool_call|>",),
        inner=(_QUOTE,),
        is_open=partial(is_open, _QUOTE),
    ),
    parse=partial(parse, _QUOTE),
    call_grammar=partial(call_grammar, _QUOTE, "<|tool_call>", "<tool_call|>"),
)
FUNCTION_GEMMA = ToolFormat(
    name="function_gemma",
    template_pattern=re.compile("<start_function_call>"),
    region=Region(
        opening=("<start_function_call>",),
        closing=("<end_function_call>",),
        inner=("<escape>",),
        is_open=partial(is_open, "<escape>"),
    ),
    parse=partial(parse, "<escape>"),
    call_grammar=partial(call_grammar, "<escape>", "<start_function_call>", "<end_function_call>"),
)
GEMMA3 = ToolFormat(
    name="gemma3",
    template_pattern=re.compile(r"(?s)\A(?!.*\btools\b).*<start_of_turn>"),
    region=Region(opening=("```tool_code",), closing=("```",)),
    parse=parse_fenced,
    call_grammar=call_line,
    around=("```tool_code\n", "```"),
    between="",
    instructions=(
        "To call a function, write the call in Python, with keyword arguments only, in a fence like this:\n"
        '```tool_code\nthe_function(an_argument="its value")\n```'
    ),
)
