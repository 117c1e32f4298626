"""MiniMax M2, DeepSeek V3.2, Muse and Step 3: names are attributes of tags.

All but MiniMax have a prefix in their tags, and DeepSeek marks strings.

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


def dsml_grammar(tool: Tool) -> CallGrammar:
    arguments = arguments_and_end(tool, _dsml_tags, f"</{_DSML}invoke>\n")
    return (f'<{_DSML}invoke name="{tool.name}">\n', *arguments)


def _dsml_tags(schema: Any) -> ArgumentTags:
    is_string = "true" if is_text(schema) else "false"
    return [f'<{_DSML}parameter name="{{}}" string="{is_string}">'], f"</{_DSML}parameter>\n"


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
        template_pattern=re.compile(around[0]),
        region=_region(mark, around),
        parse=partial(parse, mark),
        call_grammar=partial(call_grammar, mark),
        around=(f"{around[0]}\n", around[1]),
        between="",
    )


MINIMAX = _format("minimax", "", ("<minimax:tool_call>", "</minimax:tool_call>"))
MUSE = _format("muse", "atem:", ("<atem:function_calls>", "</atem:function_calls>"))
DEEPSEEK = replace(
    _format("deepseek_v32", _DSML, (f"<{_DSML}function_calls>", f"</{_DSML}function_calls>")),
    call_grammar=dsml_grammar,
)
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
