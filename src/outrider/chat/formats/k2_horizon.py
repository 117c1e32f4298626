"""K2 Horizon: keys and values between tags with a prefix. The template may ask for types or for JSON instead.

<ifm|tool_calls>
<ifm|tool_call>f
<ifm|arg_key>a</ifm|arg_key>
<ifm|arg_value>1</ifm|arg_value>
</ifm|tool_call>
</ifm|tool_calls>

With types, <ifm|arg_type>integer</ifm|arg_type> stands between key and value. All three are read.
Reasoning is told from the text for the effort "high", which is the template's default.
"""

from __future__ import annotations

import re

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import NEWLINE, CallGrammar
from outrider.chat.formats.json_calls import call_with, parse_json_calls
from outrider.chat.formats.reasoning_format import ReasoningFormat
from outrider.chat.formats.tool_format import ParsedCall, Region, ToolFormat, ToolsByName
from outrider.chat.formats.typed_values import arguments_and_end, covering, typed

_AROUND = ("<ifm|tool_calls>", "</ifm|tool_calls>")
_KEY, _KEY_END = "<ifm|arg_key>", "</ifm|arg_key>"
_VALUE, _VALUE_END = "<ifm|arg_value>", "</ifm|arg_value>"
_PAIR = re.compile(
    r"<ifm\|arg_key>(.*?)</ifm\|arg_key>\s*(?:<ifm\|arg_type>(.*?)</ifm\|arg_type>\s*)?"
    r"<ifm\|arg_value>(.*?)</ifm\|arg_value>\s*",
    re.DOTALL,
)


def parse(body: str, tools: ToolsByName) -> list[ParsedCall]:
    if body.lstrip().startswith("{"):
        return parse_json_calls(body, tools)
    name, key_tag, rest = body.partition(_KEY)
    name = name.strip()
    if not name or re.search(r"[\s<{]", name):
        raise ValueError("a call needs a name")
    tool = tools.get(name)
    found = covering(_PAIR, key_tag + rest)
    return [call_with(name, {m[1].strip(): typed(tool, m[1].strip(), m[3].strip("\n")) for m in found})]


def is_open(body: str) -> bool:
    return body.rfind(_VALUE) > body.rfind(_VALUE_END)


def call_grammar(tool: Tool) -> CallGrammar:
    """As the template asks for calls by default."""
    before = (NEWLINE, f"{_KEY}{{}}{_KEY_END}", NEWLINE, _VALUE)
    arguments = arguments_and_end(tool, (before, _VALUE_END), NEWLINE, "</ifm|tool_call>")
    return (f"<ifm|tool_call>{tool.name}", *arguments, NEWLINE)


FORMAT = ToolFormat(
    name="k2_horizon",
    template_pattern=re.compile(re.escape("<ifm|tool_call")),
    region=Region(
        before=_AROUND[:1],
        opening=("<ifm|tool_call>",),
        closing=("</ifm|tool_call>",),
        after=_AROUND[1:],
        inner=(_KEY, _KEY_END, _VALUE, _VALUE_END, "<ifm|arg_type>", "</ifm|arg_type>"),
        is_open=is_open,
    ),
    parse=parse,
    call_grammar=call_grammar,
    around=((_AROUND[0], NEWLINE), _AROUND[1]),
    between="",
)
REASONING = ReasoningFormat("k2_horizon", re.compile(r"<ifm\|think>"), "<ifm|think>", "</ifm|think>")
