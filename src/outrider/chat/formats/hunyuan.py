"""Hunyuan 3 and 4 (Hy3, Hy4): keys and values between tags, as GLM has them, and tags around all calls.

<tool_calls>
<tool_call>f<tool_sep>
<arg_key>a</arg_key>
<arg_value>1</arg_value>
</tool_call>
</tool_calls>

Version 4 writes neither <tool_sep> nor line breaks. The tags of some checkpoints end in a suffix, such as
<tool_call:opensource>: the tokenizer's added tokens show it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import partial

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import NEWLINE, CallGrammar
from outrider.chat.formats.json_calls import call_with
from outrider.chat.formats.tool_format import ParsedCall, Region, ToolFormat, ToolsByName
from outrider.chat.formats.typed_values import arguments_and_end, covering, typed

_SUFFIXED = re.compile(r"<tool_calls(:[^\s<>]+)>")


def parse(suffix: str, body: str, tools: ToolsByName) -> list[ParsedCall]:
    name, key_tag, rest = body.partition(f"<arg_key{suffix}>")
    name = name.strip().removesuffix(f"<tool_sep{suffix}>").strip()
    if not name or re.search(r"[\s<{]", name):
        raise ValueError("a call needs a name")
    end = re.escape(suffix)
    pair = re.compile(
        rf"<arg_key{end}>(.*?)</arg_key{end}>\s*<arg_value{end}>(.*?)</arg_value{end}>\s*", re.DOTALL
    )
    tool = tools.get(name)
    found = covering(pair, key_tag + rest)
    return [call_with(name, {m[1].strip(): typed(tool, m[1].strip(), m[2].strip("\n")) for m in found})]


def is_open(suffix: str, body: str) -> bool:
    return body.rfind(f"<arg_value{suffix}>") > body.rfind(f"</arg_value{suffix}>")


def call_grammar(suffix: str, separator: str, tool: Tool) -> CallGrammar:
    before = (NEWLINE, f"<arg_key{suffix}>{{}}</arg_key{suffix}>", NEWLINE, f"<arg_value{suffix}>")
    end = (NEWLINE, f"</tool_call{suffix}>")
    arguments = arguments_and_end(tool, (before, f"</arg_value{suffix}>"), *end)
    return (f"<tool_call{suffix}>{tool.name}{separator}", *arguments, NEWLINE)


def _format(name: str, suffix: str = "") -> ToolFormat:
    separator = f"<tool_sep{suffix}>" if name == "hy_v3" else ""
    tags = [f"<{part}{suffix}>" for part in ("arg_key", "/arg_key", "arg_value", "/arg_value")]
    calls = r"(?s)(?=.*<tool_calls(?::[^\s<>]+)?>)"
    return ToolFormat(
        name=name,
        template_pattern=re.compile(f"{calls}.*<{'tool_sep' if separator else 'arg_key'}[:>]"),
        region=Region(
            before=(f"<tool_calls{suffix}>",),
            opening=(f"<tool_call{suffix}>",),
            closing=(f"</tool_call{suffix}>",),
            after=(f"</tool_calls{suffix}>",),
            inner=(*tags, *filter(None, [separator])),
            is_open=partial(is_open, suffix),
        ),
        parse=partial(parse, suffix),
        call_grammar=partial(call_grammar, suffix, separator),
        around=((f"<tool_calls{suffix}>", NEWLINE), f"</tool_calls{suffix}>"),
        between="",
        for_tokens=partial(_with_suffix, name),
    )


def _with_suffix(name: str, tokens: Collection[str]) -> ToolFormat:
    found = (match for token in tokens if (match := _SUFFIXED.fullmatch(token)))
    match = next(found, None)
    return _format(name, match[1] if match else "")


HY_V3 = _format("hy_v3")
HY_V4 = _format("hy_v4")
