"""Owns the rule that a call has no undeclared arguments.

Where a tool's schema omits `additionalProperties`, it is false: most tools are functions, and a function
fails if it gets an argument that it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# Keywords that say themselves which further properties there may be.
OPEN_ON_PURPOSE = (
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "propertyNames",
    "minProperties",
)
# Keywords whose schemas describe the same object as the schema around them.
SAME_OBJECT = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas")
NOTES = ("title", "description", "examples", "default", "deprecated", "readOnly", "writeOnly", "$comment")
# Keywords that contain schemas: by name, in a list, alone.
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
ALONE = ("items", "additionalProperties")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, in which no object has undeclared properties.

    If several schemas describe one object, what one of them leaves undeclared another one may declare. Then
    only the outermost object is closed, unless it is such an object itself.
    """
    if not any(map(_is_described_twice, _all_schemas(schema))):
        schema = _with_members(schema, _closed)
    return _close(schema, is_outermost=True)


def without_notes(schema: Any) -> Any:
    """The schema without what is written for people: a grammar does not need it, and it may be long."""
    if not isinstance(schema, Mapping):
        return schema
    kept = {keyword: value for keyword, value in schema.items() if keyword not in NOTES}
    return _with_members(kept, without_notes)


def _closed(schema: Any) -> Any:
    return _close(_with_members(schema, _closed)) if isinstance(schema, Mapping) else schema


def _close(schema: Mapping[str, Any], is_outermost: bool = False) -> dict[str, Any]:
    """Close this object alone. An inner object that declares nothing may have any properties."""
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    is_open = any(keyword in schema for keyword in (*OPEN_ON_PURPOSE, *SAME_OBJECT))
    is_sound = isinstance(properties, Mapping) and isinstance(required, list)
    if is_open or not is_sound or not (properties or is_outermost):
        return dict(schema)
    if not all(isinstance(name, str) and name in properties for name in required):
        return dict(schema)
    return {**schema, "properties": properties, "additionalProperties": False}


def _is_described_twice(schema: Mapping[str, Any]) -> bool:
    return "allOf" in schema or ("properties" in schema and any(keyword in schema for keyword in SAME_OBJECT))


def _with_members(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The schema with `change` applied to the schemas directly inside it."""
    found = dict(schema)
    for keyword, value in schema.items():
        if keyword in BY_NAME and isinstance(value, Mapping):
            found[keyword] = {name: change(member) for name, member in value.items()}
        elif keyword in LISTED and isinstance(value, list):
            found[keyword] = [change(member) for member in value]
        elif keyword in ALONE:
            found[keyword] = change(value)
    return found


def _all_schemas(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = [schema]
    for outer in found:  # grows meanwhile
        members: list[Any] = []
        _with_members(outer, members.append)
        found += [member for member in members if isinstance(member, Mapping)]
    return found
