"""Owns arguments that are written as bare text between tags: the tool's schema gives each its JSON type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from outrider.chat.conversation import Tool
from outrider.chat.formats.call_grammar import (
    Element,
    FreeText,
    JsonValue,
    OneOf,
    OptionalElements,
    RequiredElement,
)
from outrider.chat.formats.json_calls import arguments_of
from outrider.chat.json_text import loads


def typed(tool: Tool | None, name: str, text: str) -> Any:
    """The value of an argument: a string if the schema wants a string, else JSON, or a string if not JSON."""
    kinds = _kinds(_properties(tool.parameters if tool is not None else {}).get(name))
    if "string" in kinds:
        return None if text == "null" and "null" in kinds else text
    try:
        return loads(text)
    except ValueError:
        return text


def covering(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Consecutive matches of a pattern over the whole text. Raises ValueError for text between them."""
    matches, at = [], 0
    while at < len(text):
        match = pattern.match(text, at)
        if match is None or match.end() == at:
            raise ValueError("there is text between the arguments")
        matches.append(match)
        at = match.end()
    return matches


def argument_elements(tool: Tool, before: str, after: str) -> tuple[Element, ...]:
    """For grammars: each argument with a text before and after it, in which {} is replaced by its name."""
    required = _list(tool.parameters.get("required"))
    schema = arguments_of(tool)
    elements: list[Element] = []
    for name, member in _properties(schema.schema).items():
        written = (before.replace("{}", name), *_value_elements(member, after, schema))
        elements.extend(written if name in required else (OptionalElements(written),))
    return tuple(elements)


def _value_elements(member: Any, after: str, whole: JsonValue) -> tuple[RequiredElement, ...]:
    if "string" in _kinds(member):
        choices = tuple(choice for choice in _list(member.get("enum")) if isinstance(choice, str))
        return (OneOf(choices), after) if choices else (FreeText(after),)
    definitions = {key: whole.schema[key] for key in ("$defs", "definitions") if key in whole.schema}
    schema = {**member, **definitions} if isinstance(member, Mapping) else {}
    return (JsonValue(schema, whole.is_strict), after)


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _kinds(schema: Any) -> set[str]:
    """The types that a schema allows, itself or in its alternatives."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type")
    listed = kinds if isinstance(kinds, list) else [kinds]
    named = {kind for kind in listed if isinstance(kind, str)}
    for keyword in ("anyOf", "oneOf"):
        for part in _list(schema.get(keyword)):
            named |= _kinds(part)
    if isinstance(schema.get("enum"), list) and all(isinstance(choice, str) for choice in schema["enum"]):
        named.add("string")
    return named


def _list(value: Any) -> list[Any]:
    """Clients' schemas are not checked: any value may stand where a list belongs."""
    return list(value) if isinstance(value, (list, tuple)) else []
