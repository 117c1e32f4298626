"""Grammars that crash llguidance, or take it very long, and schemas that are merely large."""

from __future__ import annotations

import json
from typing import Any

from outrider.answer_form import Grammar


def rule_chain(length: int) -> str:
    """Lark rules, each of which names the next one."""
    rules = [f'r{i}: "a" r{i + 1}' for i in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "b"'])


def reference_chain(length: int) -> dict[str, Any]:
    """A JSON schema of objects, each of which refers to the next one."""
    definitions: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)
    }
    return {"$defs": {**definitions, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def wide_schema(num_optional: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(num_optional)}}


def ambiguous(num_rules: int) -> str:
    """Lark rules, all of which match the same text: the work for one token grows with their cube."""
    choices = " | ".join(f"a{i} s" for i in range(num_rules))
    rules = [f"a{i}: /[a-z]{{1,{i + 1}}}/ | " for i in range(num_rules)]
    return "\n".join(["start: s*", f's: {choices} | "z"', *rules])


def lark(text: str) -> Grammar:
    return Grammar("lark", text)


def schema(definition: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(definition))
