"""MiniMax M2, Dots, DeepSeek V3.2 and later, Muse and Step 3: names are attributes of tags.

All but MiniMax and Dots have a prefix in their tags, and DeepSeek marks strings.

<minimax:tool_call>
<invoke name="f">
<parameter name="a">1</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar
from outrider.chat.formats.json_calls import call_with
from outrider.chat.formats.reasoning_format import Framing, MessageKind, ReasoningFormat
from outrider.chat.formats.tool_format import ParsedCall, Region, ToolFormat, ToolsByName
from outrider.chat.formats.typed_values import ArgumentTags, arguments_and_end, covering, is_text, typed

_NAME = re.compile(r'\s*"([^"]+)"\s*>\s*')
_DSML = "｜DSML｜"
_STEP_CALL = "<｜tool_call_begin｜>function<｜tool_sep｜>"


def parse(mark: str, body: str, tools: ToolsByName) -> list[ParsedCall]:
    name = _NAME.match(body)
    if name is None:
        raise ValueError("a call needs a name")
    parameter = re.compile(
        rf'<{mark}parameter name="([^"]+)"(?: string="(true|false)")?[^>]*>(.*?)</{mark}parameter>\s*',
        re.DOTALL,
    )
    tool = tools.get(name[1])
    found = covering(parameter, body[name.end() :])
    return [call_with(name[1], {m[1]: m[3] if m[2] == "true" else typed(tool, m[1], m[3]) for m in found})]


def is_open(mark: str, body: str) -> bool:
    return body.rfind(f"<{mark}parameter ") > body.rfind(f"</{mark}parameter>")


def call_grammar(mark: str, tool: Tool) -> CallGrammar:
    tags = [f'<{mark}parameter name="{{}}">'], f"</{mark}parameter>\n"
    arguments = arguments_and_end(tool, tags, f"</{mark}invoke>\n")
    return (f'<{mark}invoke name="{tool.name}">\n', *arguments)


def dsml_grammar(mark: str, tool: Tool) -> CallGrammar:
    arguments = arguments_and_end(tool, partial(_dsml_tags, mark), f"</{mark}invoke>\n")
    return (f'<{mark}invoke name="{tool.name}">\n', *arguments)


def _dsml_tags(mark: str, schema: Any) -> ArgumentTags:
    is_string = "true" if is_text(schema) else "false"
    return [f'<{mark}parameter name="{{}}" string="{is_string}">'], f"</{mark}parameter>\n"


def step_grammar(tool: Tool) -> CallGrammar:
    tags = ['<steptml:parameter name="{}">'], "</steptml:parameter>"
    arguments = arguments_and_end(tool, tags, "</steptml:invoke>", "<｜tool_call_end｜>")
    return (f'{_STEP_CALL}<steptml:invoke name="{tool.name}">', *arguments)


def _region(mark: str, around: tuple[str, str]) -> Region:
    return Region(
        before=around[:1],
        opening=(f"<{mark}invoke name=",),
        closing=(f"</{mark}invoke>",),
        after=around[1:],
        inner=(f"<{mark}parameter ", f"</{mark}parameter>", *filter(None, [mark])),
        is_open=partial(is_open, mark),
    )


def _format(name: str, mark: str, around: tuple[str, str]) -> ToolFormat:
    return ToolFormat(
        name=name,
        template_pattern=re.compile(re.escape(around[0])),
        region=_region(mark, around),
        parse=partial(parse, mark),
        call_grammar=partial(call_grammar, mark),
        around=(f"{around[0]}\n", around[1]),
        between="",
    )


def _dsml(name: str, mark: str, outer: str) -> ToolFormat:
    around = (f"<{mark}{outer}>", f"</{mark}{outer}>")
    return replace(_format(name, mark, around), call_grammar=partial(dsml_grammar, mark))


MINIMAX = _format("minimax", "", ("<minimax:tool_call>", "</minimax:tool_call>"))
DOTS = _format("dots", "", ("<dots_function_call>", "</dots_function_call>"))
MUSE = _format("muse", "atem:", ("<atem:function_calls>", "</atem:function_calls>"))
# Its template is Python code: the token in its tags tells it from V3, whose tokens it has as well.
DEEPSEEK = replace(
    _dsml("deepseek_v32", _DSML, "function_calls"),
    template_pattern=re.compile(f"<{_DSML}function_calls>|(?m:^{_DSML}$)"),
)
DEEPSEEK_V4 = _dsml("deepseek_v4", _DSML, "tool_calls")
DEEPSEEK_V41 = _dsml("deepseek_v41", f"{_DSML} ", "calls")
STEP3 = ToolFormat(
    name="step3",
    template_pattern=re.compile("<steptml:|<｜tool_calls_begin｜>"),
    region=replace(
        _region("steptml:", ("", "")),
        before=(f"<｜tool_calls_begin｜>{_STEP_CALL}", f"<｜tool_calls_begin｜>\n{_STEP_CALL}", _STEP_CALL),
        after=("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
    ),
    parse=partial(parse, "steptml:"),
    call_grammar=step_grammar,
    around=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    between="",
)


_RECIPIENT = re.compile(r"to=([\w.-]+)")


def muse_kind(header: str) -> MessageKind:
    """Of one of Muse's messages: to itself, to the user, or to a function."""
    found = _RECIPIENT.search(header)
    if found is None or found[1] in ("user", "commentary"):
        return "text"
    return "reasoning" if found[1] == "self" else "calls"


MUSE_REASONING = ReasoningFormat(
    name="muse",
    template_pattern=re.compile(r"(?s)(?=.*<\|eom\|>).*<atem:function_calls>"),
    opening=" to=self<|message|>",
    closing="<|eom|>",
    answer=" to=user<|message|>",
    framing=Framing(
        starts=("<|start|>",),
        contents=("<|message|>",),
        ends=("<|eom|>", "<|eot|>"),
        kind=muse_kind,
        next_message="<|start|>assistant",
        recipient=" to=",
        reasoning_name="self",
    ),
)
