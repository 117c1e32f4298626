"""Undeclared arguments: a tool's schema that omits additionalProperties forbids them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_grammars import accepts, constraint, request_for

from outrider.chat.closed_schema import closed, without_notes
from outrider.chat.conversation import Tool
from outrider.chat.formats import hermes, qwen3_coder
from outrider.chat.schema import problem

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
A = {"type": "object", "properties": {"a": {"type": "integer"}}}
B = {"type": "object", "properties": {"b": {"type": "integer"}}}

FORBIDDEN: dict[str, tuple[dict[str, Any], Any]] = {
    "an undeclared argument": (CITY, {"city": "Oslo", "x": 1}),
    "no arguments are declared": ({}, {"x": 1}),
    "an object without properties": ({"type": "object"}, {"x": 1}),
    "inside an argument": ({"properties": {"at": CITY}}, {"at": {"city": "Oslo", "x": 1}}),
    "inside a list": ({"properties": {"all": {"items": CITY}}}, {"all": [{"city": "Oslo", "x": 1}]}),
    "one of several forms": ({"properties": {"at": {"anyOf": [A, B]}}}, {"at": {"a": 1, "b": 2}}),
    "a definition": (
        {"properties": {"at": {"$ref": "#/$defs/c"}}, "$defs": {"c": CITY}},
        {"at": {"city": "Oslo", "x": 1}},
    ),
    "beside an object of two schemas": ({"properties": {"at": {"allOf": [A, B]}}}, {"x": 1}),
}
ALLOWED: dict[str, tuple[dict[str, Any], Any]] = {
    "what is declared": (CITY, {"city": "Oslo"}),
    "a tool that allows others": ({**CITY, "additionalProperties": True}, {"city": "Oslo", "x": 1}),
    "others of a type": ({**CITY, "additionalProperties": {"type": "integer"}}, {"city": "Oslo", "x": 1}),
    "names by a pattern": ({**CITY, "patternProperties": {"^x": {}}}, {"city": "Oslo", "x": 1}),
    "an inner object that declares nothing": ({"properties": {"at": {"type": "object"}}}, {"at": {"x": 1}}),
    "an object of two schemas": ({"properties": {"at": {"allOf": [A, B]}}}, {"at": {"a": 1, "b": 2}}),
    "arguments of two schemas": ({"allOf": [A, B]}, {"a": 1, "b": 2}),
    "a definition that is extended": (
        {"properties": {"at": {"$ref": "#/$defs/a", **B}}, "$defs": {"a": A}},
        {"at": {"a": 1, "b": 2}},
    ),
    "required and not declared": ({"type": "object", "required": ["x"]}, {"x": 1}),
    "an argument that is called like a keyword": (
        {"properties": {"allOf": {"type": "string"}, "properties": CITY}},
        {"allOf": "x", "properties": {"city": "Oslo"}},
    ),
}


@pytest.mark.parametrize("case", FORBIDDEN)
def test_undeclared_arguments_are_forbidden(case: str) -> None:
    schema, arguments = FORBIDDEN[case]
    assert problem(arguments, schema) is None
    assert problem(arguments, closed(schema)) is not None


@pytest.mark.parametrize("case", ALLOWED)
def test_declared_arguments_stay_allowed(case: str) -> None:
    schema, arguments = ALLOWED[case]
    assert problem(arguments, closed(schema)) is None


@pytest.mark.parametrize(
    "schema",
    [{"required": True}, {"required": [[]]}, {"properties": 5}, {"$defs": 1, "anyOf": {}, "items": [5]}],
)
def test_nonsense_is_left_to_the_compiler(schema: dict[str, Any]) -> None:
    assert schema.items() <= closed(schema).items()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "properties", "required", "items", "anyOf", "allOf", "$defs", "a"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["properties", "required", "anyOf", "allOf", "items"]), json_values))
def test_any_json_is_survived_and_closing_twice_changes_nothing(schema: dict[str, Any]) -> None:
    once = closed(schema)
    assert closed(once) == once


def test_notes_for_people_are_left_out_and_properties_of_such_names_are_kept() -> None:
    noted = {
        "title": "T",
        "properties": {
            "title": {"type": "string", "description": "long"},
            "default": {"items": {"title": "t"}},
        },
        "required": ["title"],
    }
    assert without_notes(noted) == {
        "properties": {"title": {"type": "string"}, "default": {"items": {}}},
        "required": ["title"],
    }


@pytest.mark.parametrize("format", [hermes.FORMAT, qwen3_coder.FORMAT], ids=lambda format: format.name)
def test_a_forced_call_has_no_undeclared_arguments(format: Any) -> None:
    inner = {"type": "object", "properties": {"days": {"type": "integer"}}}
    tool = Tool("get_weather", "", {"type": "object", "properties": {"when": inner}, "required": ["when"]})
    value = {"when": {"days": 2}} if format is hermes.FORMAT else {"days": 2}
    parts = format.call_grammar(tool)
    call = "".join(part if isinstance(part, str) else json.dumps(value) for part in parts)
    text = call.join(format.tags)
    request = replace(request_for(tool_choice="required"), tools=(tool,))
    grammar = constraint(format, request).grammar
    assert accepts(grammar, text)
    assert not accepts(grammar, text.replace('"days": 2', '"days": 2, "x": 1'))
