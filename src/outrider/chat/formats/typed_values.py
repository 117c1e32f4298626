"""Owns arguments that are written as bare text between tags: the tool's schema gives each its JSON type."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
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
    """The value of an argument of a tool that may be unknown."""
    return typed_value(member_schema(tool.parameters if tool is not None else {}, name), text)


def typed_value(schema: Any, text: str) -> Any:
    """A string if the schema wants a string, else JSON, or a string if the text is not JSON."""
    kinds = _kinds(schema)
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


# What stands before and after the value of an argument; in texts, {} is the argument's name.
ArgumentTags = tuple[Sequence[RequiredElement], str]


def arguments_and_end(
    tool: Tool, tags: ArgumentTags | Callable[[Any], ArgumentTags], *end: RequiredElement
) -> tuple[Element, ...]:
    """For grammars: the arguments, each with its tags, and the end of the call.

    `tags` may be a function of the argument's schema, in formats that write the types of arguments. If the
    tool's schema does not name all arguments, any text is allowed up to the end.
    """
    arguments = arguments_of(tool)
    if not has_fixed_arguments(arguments):
        return (FreeText("".join(part for part in end if isinstance(part, str))),)
    elements: list[Element] = []
    for name, member, is_required in properties_of(arguments):
        before, after = tags(member) if callable(tags) else tags
        named = [part.replace("{}", name) if isinstance(part, str) else part for part in before]
        written = (*named, *_value_elements(member, after.replace("{}", name), arguments))
        elements.extend(written if is_required else (OptionalElements(written),))
    return (*elements, *end)


def has_fixed_arguments(arguments: JsonValue) -> bool:
    """True if the schema names all arguments of a call. Otherwise a grammar cannot list them."""
    return arguments.schema.get("additionalProperties") is False


def properties_of(arguments: JsonValue) -> list[tuple[str, Any, bool]]:
    """Name, schema and whether it is required, of each argument."""
    required = _list(arguments.schema.get("required"))
    properties = _properties(arguments.schema)
    return [(name, member, name in required) for name, member in properties.items()]


def with_definitions(member: Any, arguments: JsonValue) -> JsonValue:
    """The value of an argument as JSON. Its schema may refer to definitions of the whole schema."""
    schema = arguments.schema
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return JsonValue({**member, **definitions} if isinstance(member, Mapping) else {}, arguments.is_strict)


def allows(schema: Any, kind: str) -> bool:
    return kind in _kinds(schema)


def member_schema(schema: Any, name: str) -> Any:
    """The schema of an object's property; None if the schema does not name the property."""
    return _properties(schema if isinstance(schema, Mapping) else {}).get(name)


def item_schema(schema: Any) -> Any:
    return schema.get("items") if isinstance(schema, Mapping) else None


def is_text(schema: Any) -> bool:
    """True if an argument under this schema is written as bare text."""
    return "string" in _kinds(schema)


def _value_elements(member: Any, after: str, arguments: JsonValue) -> tuple[RequiredElement, ...]:
    if not is_text(member):
        return (with_definitions(member, arguments), after)
    choices = tuple(choice for choice in _list(member.get("enum")) if isinstance(choice, str))
    return (OneOf(choices), after) if choices else (FreeText(after),)


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
