"""Arguments against a schema: the common keywords."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.chat.schema import problem

TREE: dict[str, Any] = {
    "$defs": {
        "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["id"]}
    },
    "$ref": "#/$defs/node",
}

CASES: list[tuple[Any, Any, bool]] = [
    ({}, {"a": 1}, True),
    (True, 1, True),
    (False, 1, False),
    ({"type": "string"}, "a", True),
    ({"type": "string"}, 1, False),
    ({"type": ["string", "null"]}, None, True),
    ({"type": "integer"}, 2.0, True),
    ({"type": "integer"}, 2.5, False),
    ({"type": "integer"}, True, False),
    ({"type": "number"}, 1, True),
    ({"type": "boolean"}, 1, False),
    ({"enum": ["a", 1]}, 1, True),
    ({"enum": ["a", 1]}, True, False),
    ({"const": None}, None, True),
    ({"const": 1}, 2, False),
    ({"required": ["a"]}, {}, False),
    ({"properties": {"a": {"type": "string"}}}, {"a": 1}, False),
    ({"properties": {"a": {}}, "additionalProperties": False}, {"b": 1}, False),
    ({"properties": {"a": {}}, "additionalProperties": {"type": "string"}}, {"b": "x"}, True),
    ({"patternProperties": {"b": {}}, "additionalProperties": False}, {"b": 1}, True),
    ({"items": {"type": "string"}}, ["a", 1], False),
    ({"prefixItems": [{"type": "integer"}], "items": False}, [1, 2], False),
    ({"minItems": 1, "maxItems": 2}, [], False),
    ({"minLength": 1, "maxLength": 2}, "abc", False),
    ({"minimum": 0, "maximum": 1}, 2, False),
    ({"exclusiveMinimum": 0}, 0, False),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, None, True),
    ({"oneOf": [{"type": "string"}, {"type": "null"}]}, 1, False),
    ({"allOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"a": 1}, False),
    (TREE, {"id": 1, "next": {"id": 2}}, True),
    (TREE, {"id": 1, "next": {}}, False),
    ({"$ref": "#"}, 1, True),
    ({"$ref": "elsewhere.json"}, 1, True),
    ({"required": [[], {}, None, "a"]}, {"a": 1}, True),
    ({"type": 3, "enum": "x", "required": 1, "properties": [], "minimum": "a", "anyOf": {}}, 1, True),
]


@pytest.mark.parametrize(("schema", "value", "fits"), CASES)
def test_a_value_under_a_schema(schema: Any, value: Any, fits: bool) -> None:
    assert (problem(value, schema) is None) == fits


def test_a_problem_says_where_it_is() -> None:
    schema = {"properties": {"a": {"items": {"type": "string"}}}}
    assert problem({"a": ["x", 1]}, schema) == "arguments.a[1] is not of type string"
