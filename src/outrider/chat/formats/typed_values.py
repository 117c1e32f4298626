"""Arguments that are written as bare text between tags: what JSON value each one is, by the tool's schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from outrider.chat.conversation import Tool
from outrider.chat.formats.json_calls import arguments_of
from outrider.chat.formats.shape import FreeText, JsonOf, Maybe, OneOf, Part, Sure
from outrider.chat.json_text import loads


def typed(tool: Tool | None, name: str, text: str) -> Any:
    """The value of an argument: a string where the schema wants one, else JSON, else a string after all."""
    kinds = _kinds(_properties(tool).get(name))
    if "string" in kinds:
        return None if text == "null" and "null" in kinds else text
    try:
        return loads(text)
    except ValueError:
        return text


def covering(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """The matches of a pattern, one after the other from start to end; ValueError where they leave a gap."""
    matches, at = [], 0
    while at < len(text):
        match = pattern.match(text, at)
        if match is None or match.end() == at:
            raise ValueError("there is text between the arguments")
        matches.append(match)
        at = match.end()
    return matches


def argument_parts(tool: Tool, before: str, after: str) -> tuple[Part, ...]:
    """For grammars: each argument in turn, between two texts in which {} is its name."""
    required = tool.parameters.get("required") or ()
    schema = arguments_of(tool)
    parts: list[Part] = []
    for name, member in _properties(tool).items():
        written = (before.replace("{}", name), *_value_parts(member, after, schema))
        parts.extend(written if name in required else (Maybe(written),))
    return tuple(parts)


def _value_parts(member: Any, after: str, whole: JsonOf) -> tuple[Sure, ...]:
    if "string" in _kinds(member):
        choices = member.get("enum")
        return (OneOf(tuple(map(str, choices))), after) if choices else (FreeText(after),)
    definitions = {key: whole.schema[key] for key in ("$defs", "definitions") if key in whole.schema}
    schema = {**member, **definitions} if isinstance(member, Mapping) else {}
    return (JsonOf(schema, whole.is_strict), after)


def _properties(tool: Tool | None) -> Mapping[str, Any]:
    found = tool.parameters.get("properties") if tool is not None else None
    return found if isinstance(found, Mapping) else {}


def _kinds(schema: Any) -> set[str]:
    """The types that a schema names, in itself or in its alternatives."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type")
    listed = kinds if isinstance(kinds, list) else [kinds]
    named = {kind for kind in listed if isinstance(kind, str)}
    for keyword in ("anyOf", "oneOf"):
        for part in schema.get(keyword) or ():
            named |= _kinds(part)
    if isinstance(schema.get("enum"), list) and all(isinstance(choice, str) for choice in schema["enum"]):
        named.add("string")
    return named
