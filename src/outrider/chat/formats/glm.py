"""GLM 4.5 and later: a name, then keys and values between tags. LongCat uses the same form with its own tags.

<tool_call>f
<arg_key>a</arg_key>
<arg_value>1</arg_value>
</tool_call>
"""

from __future__ import annotations

import re
from functools import partial

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar
from outrider.chat.formats.json_calls import call_with
from outrider.chat.formats.tool_format import ParsedCall, Region, ToolFormat, ToolsByName
from outrider.chat.formats.typed_values import argument_elements, covering, typed


def parse(prefix: str, body: str, tools: ToolsByName) -> list[ParsedCall]:
    name, key_tag, rest = body.partition(f"<{prefix}arg_key>")
    name = name.strip()
    if not name or re.search(r"[\s<{]", name):
        raise ValueError("a call needs a name")
    pair = re.compile(
        rf"<{prefix}arg_key>(.*?)</{prefix}arg_key>\s*<{prefix}arg_value>(.*?)</{prefix}arg_value>\s*",
        re.DOTALL,
    )
    tool = tools.get(name)
    found = covering(pair, key_tag + rest)
    return [call_with(name, {m[1].strip(): typed(tool, m[1].strip(), m[2].strip("\n")) for m in found})]


def is_open(prefix: str, body: str) -> bool:
    return body.rfind(f"<{prefix}arg_value>") > body.rfind(f"</{prefix}arg_value>")


def call_grammar(prefix: str, tool: Tool) -> CallGrammar:
    before = f"\n<{prefix}arg_key>{{}}</{prefix}arg_key>\n<{prefix}arg_value>"
    arguments = argument_elements(tool, before, f"</{prefix}arg_value>")
    return (f"<{prefix}tool_call>{tool.name}", *arguments, f"\n</{prefix}tool_call>")


def _format(name: str, prefix: str) -> ToolFormat:
    tags = (f"<{prefix}arg_key>", f"</{prefix}arg_key>", f"<{prefix}arg_value>", f"</{prefix}arg_value>")
    return ToolFormat(
        name=name,
        template_pattern=re.compile(tags[0]),
        region=Region(
            opening=(f"<{prefix}tool_call>",),
            closing=(f"</{prefix}tool_call>",),
            inner=tags,
            is_open=partial(is_open, prefix),
        ),
        parse=partial(parse, prefix),
        call_grammar=partial(call_grammar, prefix),
    )


FORMAT = _format("glm", "")
LONGCAT = _format("longcat", "longcat_")
