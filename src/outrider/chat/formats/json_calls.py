"""Owns calls that are written as JSON objects, as in many formats: {"name": …, "arguments": {…}}."""

from __future__ import annotations

import re
from typing import Any

from outrider.chat.closed_schema import closed
from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import CallGrammar, JsonValue
from outrider.chat.formats.tool_format import ParsedCall, ToolsByName
from outrider.chat.json_text import JsonEnd, dumps, loads


def parse_json_calls(body: str, tools: ToolsByName) -> list[ParsedCall]:
    return calls_from(loads(body))


def calls_from(value: Any) -> list[ParsedCall]:
    """The calls in a JSON value: an object or a list of objects. Raises ValueError for anything else."""
    if isinstance(value, list) and value:
        return [_call_from(item) for item in value]
    return [_call_from(value)]


def call_with(name: str, arguments: Any, id: str | None = None) -> ParsedCall:
    """A call of this name. The arguments may be an object or the JSON text of an object."""
    if isinstance(arguments, str):
        arguments = loads(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("a call's arguments must be an object")
    return ParsedCall(name, dumps(arguments), id)


def call_after(header: re.Pattern[str], body: str, tail: re.Pattern[str]) -> ParsedCall:
    """A call whose name is in a header, with JSON after it. `tail`: what may follow the JSON."""
    named = header.match(body)
    if named is None:
        raise ValueError("a call needs a name and JSON")
    rest = body[named.end() :]
    end = JsonEnd().feed(rest)
    if end is None or not tail.fullmatch(rest, end):
        raise ValueError("a call needs JSON and nothing after it")
    return call_with(named["name"], loads(rest[:end]))


def header(key: str) -> re.Pattern[str]:
    """Matches the start of {"name": "f", KEY: …, up to the value."""
    return re.compile(rf'\s*\{{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"{key}"\s*:\s*(?=\{{)')


def arguments_of(tool: Tool) -> JsonValue:
    """The tool's parameters as the schema of an object without undeclared properties."""
    return JsonValue(closed({**tool.parameters, "type": "object"}), is_strict=bool(tool.strict))


def listed_call(tool: Tool, name_key: str = "name", arguments_key: str = "arguments") -> CallGrammar:
    """For grammars: a call as a JSON object, as it stands in a list of calls."""
    return (f'{{"{name_key}": {dumps(tool.name)}, "{arguments_key}": ', arguments_of(tool), "}")


def _call_from(value: Any) -> ParsedCall:
    if not isinstance(value, dict):
        raise ValueError("a call must be an object")
    inner = value.get("function")
    if isinstance(inner, dict):
        value = inner
    name = value.get("name", value.get("tool_name", inner))
    if not isinstance(name, str):
        raise ValueError("a call needs a name")
    return call_with(name, value["arguments"] if "arguments" in value else value.get("parameters"))
