"""Calls in Python. Llama 4, and Llama 3.2 with a pythonic template: the whole answer is a list of calls.
OLMo 3: calls between tags, one in a line.

[f(a=1), g()]
<function_calls>
f(a=1)
</function_calls>
"""

from __future__ import annotations

import re

from outrider.chat.formats.call_grammar import NEWLINE
from outrider.chat.formats.python_calls import call_elements, call_line, python_calls
from outrider.chat.formats.tool_format import Region, ToolFormat

FORMAT = ToolFormat(
    name="pythonic",
    template_pattern=re.compile(r"<\|python_start\|>|\[func_name1\(params_name1="),
    region=Region(
        before=("<|python_start|>",),
        opening=("[",),
        after=("<|python_end|>",),
        value_start=re.compile(r"\s*(?=\[)"),
        is_python=True,
        opens_answer_only=True,
        keeps_opening=True,
    ),
    parse=lambda body, tools: python_calls(body),
    call_grammar=call_elements,
    around=("[", "]"),
    between=", ",
)
OLMO3 = ToolFormat(
    name="olmo3",
    template_pattern=re.compile("<function_calls>"),
    region=Region(opening=("<function_calls>",), closing=("</function_calls>",)),
    parse=lambda body, tools: python_calls(body),
    call_grammar=call_line,
    around=(("<function_calls>", NEWLINE), "</function_calls>"),
    between="",
)
