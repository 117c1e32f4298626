"""Solar Open 2: a name, then arguments one by one, between special tokens.

<|tool_call:start|>f
<|tool_arg:start|>a<|tool_arg:value|>1<|tool_arg:end|>
<|tool_call:end|>
"""

from __future__ import annotations

import re

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar
from outrider.chat.formats.json_calls import call_with
from outrider.chat.formats.reasoning_format import ReasoningFormat
from outrider.chat.formats.tool_format import ParsedCall, Region, ToolFormat, ToolsByName
from outrider.chat.formats.typed_values import arguments_and_end, covering, typed

_START, _VALUE, _END = "<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>"
_CALL_END = "<|tool_call:end|>"
_ARGUMENT = re.compile(
    rf"{re.escape(_START)}(.*?){re.escape(_VALUE)}(.*?){re.escape(_END)}\s*",
    re.DOTALL,
)


def parse(body: str, tools: ToolsByName) -> list[ParsedCall]:
    name, start, rest = body.partition(_START)
    name = name.strip()
    if not name or re.search(r"[\s<{]", name):
        raise ValueError("a call needs a name")
    tool = tools.get(name)
    found = covering(_ARGUMENT, start + rest)
    return [call_with(name, {m[1].strip(): typed(tool, m[1].strip(), m[2]) for m in found})]


def is_open(body: str) -> bool:
    return body.rfind(_START) > body.rfind(_END)


def call_grammar(tool: Tool) -> CallGrammar:
    arguments = arguments_and_end(tool, ([f"{_START}{{}}{_VALUE}"], f"{_END}\n"), _CALL_END)
    return (f"<|tool_call:start|>{tool.name}\n", *arguments)


FORMAT = ToolFormat(
    name="solar_open2",
    template_pattern=re.compile(re.escape("<|tool_arg:start|>")),
    region=Region(
        opening=("<|tool_call:start|>",),
        closing=(_CALL_END,),
        inner=(_START, _VALUE, _END),
        is_open=is_open,
    ),
    parse=parse,
    call_grammar=call_grammar,
)
REASONING = ReasoningFormat(
    "solar_open2", re.compile(r"<\|think:start\|>"), "<|think:start|>", "<|think:end|>"
)
