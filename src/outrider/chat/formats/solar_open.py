"""Solar Open: an answer is a list of messages. Calls have an id, a name and JSON, each after its own token.

<|think|>thinking<|end|><|begin|>assistant<|tool_calls|>
<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>f<|tool_call:args|>{"a": 1}<|tool_call:end|><|calls|>
"""

from __future__ import annotations

import re

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar, Pattern
from outrider.chat.formats.json_calls import arguments_of, call_with
from outrider.chat.formats.reasoning_format import Framing, MessageKind, ReasoningFormat
from outrider.chat.formats.tool_format import ParsedCall, Region, ToolFormat, ToolsByName
from outrider.chat.json_text import ends_in_string, loads

_THINK, _CONTENT, _CALLS, _CALLS_END = "<|think|>", "<|content|>", "<|tool_calls|>", "<|calls|>"
_BEGIN, _NAME, _ARGS, _END = (f"<|tool_call:{part}|>" for part in ("begin", "name", "args", "end"))
_ID = Pattern("[a-z0-9]{0,16}", "a1b2c3d4e5")
_HEADER = re.compile(rf"\s*[^\s<]*{re.escape(_NAME)}\s*(?P<name>[^\s<]+)\s*{re.escape(_ARGS)}\s*(?=\{{)")


def parse(body: str, tools: ToolsByName) -> list[ParsedCall]:
    named = _HEADER.match(body)
    if named is None:
        raise ValueError("a call needs a name and JSON")
    return [call_with(named["name"], loads(body[named.end() :]))]


def call_grammar(tool: Tool) -> CallGrammar:
    return (_BEGIN, _ID, f"{_NAME}{tool.name}{_ARGS}", arguments_of(tool), _END)


def message_kind(header: str) -> MessageKind:
    if header.endswith(_CALLS):
        return "calls"
    return "reasoning" if header.endswith(_THINK) else "text"


FORMAT = ToolFormat(
    name="solar_open",
    template_pattern=re.compile(re.escape(_ARGS)),
    region=Region(
        before=(_CALLS,),
        opening=(_BEGIN,),
        closing=(_END,),
        after=(_CALLS_END,),
        inner=(_NAME, _ARGS),
        is_open=ends_in_string,
    ),
    parse=parse,
    call_grammar=call_grammar,
    around=(_CALLS, _CALLS_END),
    between="",
    header=_HEADER,
    stops=(_CALLS_END,),
)
REASONING = ReasoningFormat(
    name="solar_open",
    template_pattern=re.compile(r"(?s)(?=.*<\|think\|>).*<\|flush\|>"),
    opening=_THINK,
    closing="<|end|>",
    answer=_CONTENT,
    framing=Framing(
        starts=("<|begin|>",),
        contents=(_THINK, _CONTENT, _CALLS),
        ends=("<|end|>", "<|flush|>", _CALLS_END),
        kind=message_kind,
        next_message="<|begin|>assistant",
        recipient="",
        reasoning_name=_THINK,
    ),
)
