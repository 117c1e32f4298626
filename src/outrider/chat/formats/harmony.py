"""gpt-oss: an answer is a list of messages, each in a channel. One format for both reasoning and calls.

<|channel|>analysis<|message|>thinking<|end|><|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{"a": 1}<|call|>
"""

from __future__ import annotations

import re

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar, OptionalElements
from outrider.chat.formats.json_calls import arguments_of, call_with
from outrider.chat.formats.reasoning_format import Framing, MessageKind, ReasoningFormat
from outrider.chat.formats.tool_format import ParsedCall, Region, ToolFormat, ToolsByName
from outrider.chat.json_text import loads

_SIGN = re.compile(r"(?s)(?=.*<\|start\|>)(?=.*<\|message\|>).*<\|channel\|>")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
STARTS = ("<|start|>", "<|channel|>")
ENDS = ("<|end|>", "<|call|>", "<|return|>")
CALL_STARTS = (
    "<|channel|>commentary to=functions.",
    "<|channel|>analysis to=functions.",
    "<|start|>assistant to=functions.",
)
MESSAGE = "<|message|>"  # between a message's header and its content


def called_function(header: str) -> str | None:
    """The function that a message is addressed to; None if it is not a call."""
    found = _RECIPIENT.search(header)
    return found[1] if found else None


def parse(body: str, tools: ToolsByName) -> list[ParsedCall]:
    header, _, content = body.partition(MESSAGE)
    name = called_function(header)
    if name is None:
        raise ValueError("the message calls no function")
    return [call_with(name, loads(content) if content.strip() else {})]


def call_grammar(tool: Tool) -> CallGrammar:
    header = f"<|start|>assistant<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>"
    return (header, arguments_of(tool))


def free_grammar(tool: Tool) -> CallGrammar:
    """The rest of a call after one of CALL_STARTS. Models order and shorten the header in several ways."""
    rest = [OptionalElements((part,)) for part in ("<|channel|>commentary", " ", "<|constrain|>", "json")]
    return (tool.name, *rest, MESSAGE, arguments_of(tool))


def message_kind(header: str) -> MessageKind:
    """The kind of a message that calls no function."""
    return "reasoning" if "<|channel|>analysis" in header else "text"


REASONING = ReasoningFormat(
    name="harmony",
    template_pattern=_SIGN,
    opening="<|channel|>analysis<|message|>",
    closing="<|end|>",
    answer="<|channel|>final<|message|>",
    inner=("<|constrain|>",),
    framing=Framing(
        starts=STARTS,
        contents=(MESSAGE,),
        ends=ENDS,
        kind=message_kind,
        next_message="<|start|>assistant",
        recipient="<|channel|>",
        reasoning_name="analysis",
    ),
)
FORMAT = ToolFormat(
    name="harmony",
    template_pattern=_SIGN,
    region=Region(opening=STARTS, closing=ENDS, inner=("<|constrain|>", MESSAGE)),
    parse=parse,
    call_grammar=call_grammar,
    free_starts=CALL_STARTS,
    free_grammar=free_grammar,
    is_single=True,
    stops=("<|call|>",),
)
