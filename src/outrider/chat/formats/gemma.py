"""Gemma. Version 4 and FunctionGemma have their own notation; version 3 was trained on fenced Python.

<|tool_call>call:f{a:1,b:<|"|>text<|"|>}<tool_call|>
<start_function_call>call:f{a:1,b:<escape>text<escape>}<end_function_call>
"""

from __future__ import annotations

import re
from functools import partial

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar
from outrider.chat.formats.json_calls import arguments_of, call_with, calls_from
from outrider.chat.formats.python_calls import python_calls
from outrider.chat.formats.tool_format import ParsedCall, Region, ToolFormat, ToolsByName
from outrider.chat.json_text import dumps, loads

_CALL = re.compile(r"\s*call:([\w.\-]+)\s*(\{.*\})\s*", re.DOTALL)
_BARE_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:")
_NONE = re.compile(r"\bNone\b")
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


def is_open(quote: str, body: str) -> bool:
    return body.count(quote) % 2 == 1


def parse_fenced(body: str, tools: ToolsByName) -> list[ParsedCall]:
    if body.lstrip().startswith("{"):
        return calls_from(loads(body))
    return python_calls(body)


def fenced_grammar(tool: Tool) -> CallGrammar:
    return (f'```tool_code\n{{"name": {dumps(tool.name)}, "parameters": ', arguments_of(tool), "}\n```")


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
)
GEMMA3 = ToolFormat(
    name="gemma3",
    template_pattern=re.compile(r"(?s)\A(?!.*\btools\b).*<start_of_turn>"),
    region=Region(opening=("```tool_code",), closing=("```",)),
    parse=parse_fenced,
    call_grammar=fenced_grammar,
    instructions=(
        "To call a function, write the call in Python, with keyword arguments only, in a fence like this:\n"
        '```tool_code\nthe_function(an_argument="its value")\n```'
    ),
)
