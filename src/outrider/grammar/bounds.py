"""Bounds of clients' grammars that are checked before a grammar is compiled, in linear time."""

from __future__ import annotations

import json
from typing import Any

from outrider.answer_form import Grammar
from outrider.request import InvalidRequest

MAX_GRAMMAR_CHARACTERS = 512 * 1024  # chosen by hand: OpenAI allows schemas 120,000 characters of names
# Properties of one object that are not required. Chosen by hand: with 1,000 a step takes up to 50 ms, with
# 2,000 up to 200 ms. Required properties have a fixed order and cost nothing.
MAX_OPTIONAL_PROPERTIES = 1_000


def check_bounds(grammar: Grammar) -> None:
    """Raise InvalidRequest if a grammar is too large."""
    length = len(grammar.text)
    if length > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequest(
            f"the {grammar.kind} grammar has {length:,} characters; the limit is {MAX_GRAMMAR_CHARACTERS:,}"
        )
    if grammar.kind == "json_schema":
        _check_schema(grammar.text)


def _check_schema(text: str) -> None:
    try:
        waiting: list[Any] = [json.loads(text)]
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the json_schema grammar cannot be read: {error}") from error
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, dict):
            _check_object(schema)
            waiting.extend(schema.values())
        elif isinstance(schema, list):
            waiting.extend(schema)


def _check_object(schema: dict[str, Any]) -> None:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or len(properties) <= MAX_OPTIONAL_PROPERTIES:
        return
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    num_optional = len(properties.keys() - names)
    if num_optional > MAX_OPTIONAL_PROPERTIES:
        raise InvalidRequest(
            f"the JSON schema has an object with {num_optional:,} optional properties; the limit is "
            f"{MAX_OPTIONAL_PROPERTIES:,}: list more of them in `required`, or split the object"
        )
