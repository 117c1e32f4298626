"""Seed-OSS: Qwen 3 Coder's tags, between tags of its own, and values on the same line as their tags.

<seed:tool_call>
<function=f>
<parameter=a>1</parameter>
</function>
</seed:tool_call>
"""

from __future__ import annotations

import re
from dataclasses import replace

from outrider.chat.conversation import Tool
from outrider.chat.formats import qwen3_coder
from outrider.chat.formats.call_grammar import CallGrammar
from outrider.chat.formats.typed_values import arguments_and_end


def call_grammar(tool: Tool) -> CallGrammar:
    arguments = arguments_and_end(tool, (["<parameter={}>"], "</parameter>\n"), "</function>")
    return (f"<function={tool.name}>\n", *arguments)


FORMAT = replace(
    qwen3_coder.FORMAT,
    name="seed_oss",
    template_pattern=re.compile("<seed:tool_call>"),
    region=replace(qwen3_coder.FORMAT.region, before=("<seed:tool_call>",), after=("</seed:tool_call>",)),
    call_grammar=call_grammar,
    tags=("<seed:tool_call>\n", "\n</seed:tool_call>"),
)
