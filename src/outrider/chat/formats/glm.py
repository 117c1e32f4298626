"""GLM 4.5 and later, and Laguna: a name, then keys and values between tags. LongCat has its own tags.

<tool_call>f
<arg_key>a</arg_key>
<arg_value>1</arg_value>
</tool_call>

GLM 4.7 and Laguna write no line breaks.
"""

from __future__ import annotations

import re
from functools import partial

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import NEWLINE, CallGrammar
from outrider.chat.formats.json_calls import call_with
from outrider.chat.formats.tool_format import ParsedCall, Region, ToolFormat, ToolsByName
from outrider.chat.formats.typed_values import arguments_and_end, covering, typed


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
    before = (NEWLINE, f"<{prefix}arg_key>{{}}</{prefix}arg_key>", NEWLINE, f"<{prefix}arg_value>")
    end = (NEWLINE, f"</{prefix}tool_call>")
    arguments = arguments_and_end(tool, (before, f"</{prefix}arg_value>"), *end)
    return (f"<{prefix}tool_call>{tool.name}", *arguments)


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
