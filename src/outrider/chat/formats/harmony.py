"""gpt-oss: an answer is a row of messages, each in a channel. One format for reasoning and calls together.

<|channel|>analysis<|message|>thinking<|end|><|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{"a": 1}<|call|>
"""

from __future__ import annotations

import re

from outrider.chat.conversation import Tool
from outrider.chat.formats.json_calls import arguments_of, call_with
from outrider.chat.formats.reasoning_format import ReasoningFormat
from outrider.chat.formats.shape import Shape
from outrider.chat.formats.tool_format import ParsedCall, Region, Toolbox, ToolFormat
from outrider.chat.json_text import loads

_SIGN = re.compile(r"(?s)(?=.*<\|start\|>)(?=.*<\|message\|>).*<\|channel\|>")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
STARTS = ("<|start|>", "<|channel|>")
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MESSAGE = "<|message|>"  # between a message's header and its content


def called_function(header: str) -> str | None:
    """The function that a message is addressed to, if it is one."""
    found = _RECIPIENT.search(header)
    return found[1] if found else None


def parse(body: str, tools: Toolbox) -> list[ParsedCall]:
    header, _, content = body.partition(MESSAGE)
    name = called_function(header)
    if name is None:
        raise ValueError("the message calls no function")
    return [call_with(name, loads(content) if content.strip() else {})]


def shape(tool: Tool) -> Shape:
    header = f"<|start|>assistant<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>"
    return (header, arguments_of(tool))


REASONING = ReasoningFormat(
    name="harmony",
    sign=_SIGN,
    opening="<|channel|>analysis<|message|>",
    closing="<|end|>",
    answer="<|channel|>final<|message|>",
    inner=(*STARTS, *ENDS, "<|constrain|>"),
)
FORMAT = ToolFormat(
    name="harmony",
    sign=_SIGN,
    region=Region(opening=STARTS, closing=ENDS, inner=("<|constrain|>", MESSAGE)),
    parse=parse,
    shape=shape,
    is_single=True,
    stops=("<|call|>",),
)
