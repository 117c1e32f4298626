"""MiniMax M2 and DeepSeek V3.2: names are attributes of tags. DeepSeek's tags have a prefix and mark strings.

<minimax:tool_call>
<invoke name="f">
<parameter name="a">1</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

import re
from functools import partial

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar
from outrider.chat.formats.json_calls import call_with
from outrider.chat.formats.tool_format import ParsedCall, Region, ToolFormat, ToolsByName
from outrider.chat.formats.typed_values import argument_elements, covering, typed

_NAME = re.compile(r'\s*"([^"]+)"\s*>\s*')
_DSML = "｜DSML｜"


def parse(mark: str, body: str, tools: ToolsByName) -> list[ParsedCall]:
    name = _NAME.match(body)
    if name is None:
        raise ValueError("a call needs a name")
    parameter = re.compile(
        rf'<{mark}parameter name="([^"]+)"(?: string="(true|false)")?\s*>(.*?)</{mark}parameter>\s*',
        re.DOTALL,
    )
    tool = tools.get(name[1])
    found = covering(parameter, body[name.end() :])
    return [call_with(name[1], {m[1]: m[3] if m[2] == "true" else typed(tool, m[1], m[3]) for m in found})]


def is_open(mark: str, body: str) -> bool:
    return body.rfind(f"<{mark}parameter ") > body.rfind(f"</{mark}parameter>")


def call_grammar(tool: Tool) -> CallGrammar:
    arguments = argument_elements(tool, '<parameter name="{}">', "</parameter>\n")
    return (f'<invoke name="{tool.name}">\n', *arguments, "</invoke>\n")


def _region(mark: str, around: tuple[str, str]) -> Region:
    return Region(
        before=around[:1],
        opening=(f"<{mark}invoke name=",),
        closing=(f"</{mark}invoke>",),
        after=around[1:],
        inner=(f"<{mark}parameter ", f"</{mark}parameter>", *filter(None, [mark])),
        is_open=partial(is_open, mark),
    )


_MINIMAX_AROUND = ("<minimax:tool_call>", "</minimax:tool_call>")

MINIMAX = ToolFormat(
    name="minimax",
    template_pattern=re.compile("<minimax:tool_call>"),
    region=_region("", _MINIMAX_AROUND),
    parse=partial(parse, ""),
    call_grammar=call_grammar,
    around=(f"{_MINIMAX_AROUND[0]}\n", _MINIMAX_AROUND[1]),
    between="",
)
DEEPSEEK = ToolFormat(
    name="deepseek_v32",
    template_pattern=re.compile(_DSML),
    region=_region(_DSML, (f"<{_DSML}function_calls>", f"</{_DSML}function_calls>")),
    parse=partial(parse, _DSML),
)
