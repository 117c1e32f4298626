"""MiniMax M2 and DeepSeek V3.2: attributes in tags. DeepSeek's tags carry a mark, and say what is a string.

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
from outrider.chat.formats.json_calls import call_with
from outrider.chat.formats.shape import Shape
from outrider.chat.formats.tool_format import ParsedCall, Region, Toolbox, ToolFormat
from outrider.chat.formats.typed_values import argument_parts, covering, typed

_NAME = re.compile(r'\s*"([^"]+)"\s*>\s*')
_DSML = "｜DSML｜"


def parse(mark: str, body: str, tools: Toolbox) -> list[ParsedCall]:
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


def shape(tool: Tool) -> Shape:
    arguments = argument_parts(tool, '<parameter name="{}">', "</parameter>\n")
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
    sign=re.compile("<minimax:tool_call>"),
    region=_region("", _MINIMAX_AROUND),
    parse=partial(parse, ""),
    shape=shape,
    around=(f"{_MINIMAX_AROUND[0]}\n", _MINIMAX_AROUND[1]),
    between="",
)
DEEPSEEK = ToolFormat(
    name="deepseek_v32",
    sign=re.compile(_DSML),
    region=_region(_DSML, (f"<{_DSML}function_calls>", f"</{_DSML}function_calls>")),
    parse=partial(parse, _DSML),
)
