"""Owns the check of a call's arguments against the tool's JSON schema: the common keywords only.

Unknown keywords are ignored. `pattern` is ignored on purpose: a client's regular expression could block the
event loop for any length of time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A schema can refer to itself: depth alone does not bound the work. What is over a limit allows everything.
MAX_SCHEMA_DEPTH = 64  # nested schemas that are checked; chosen by hand
MAX_CHECKS = 20_000  # comparisons of a value with a schema or an enum's choice, for one call; chosen by hand

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "number": (int, float),
    "integer": (int, float),
}


def problem(value: Any, schema: Any) -> str | None:
    """The first problem of a value under a schema, in a few words; None if there is none."""
    return _Check(schema).problem(value, schema, "arguments", 0)


class _Check:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_checks = 0

    def problem(self, value: Any, schema: Any, where: str, depth: int) -> str | None:
        if schema is False:
            return f"{where} is not allowed"
        if not isinstance(schema, Mapping) or depth > MAX_SCHEMA_DEPTH:
            return None
        self._num_checks += 1 + len(_list(schema.get("enum")))
        if self._num_checks > MAX_CHECKS:
            return None
        return (
            self._reference_problem(value, schema, where, depth)
            or _own_problem(value, schema, where)
            or self._combined_problem(value, schema, where, depth)
            or self._member_problem(value, schema, where, depth)
            or self._item_problem(value, schema, where, depth)
        )

    def _reference_problem(self, value: Any, schema: Mapping[str, Any], where: str, depth: int) -> str | None:
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return None
        return self.problem(value, _resolve(self._root, reference), where, depth + 1)

    def _combined_problem(self, value: Any, schema: Mapping[str, Any], where: str, depth: int) -> str | None:
        for part in _list(schema.get("allOf")):
            if found := self.problem(value, part, where, depth + 1):
                return found
        for keyword in ("anyOf", "oneOf"):
            parts = _list(schema.get(keyword))
            if parts and all(self.problem(value, part, where, depth + 1) for part in parts):
                return f"{where} fits none of {keyword}"
        return None

    def _member_problem(self, value: Any, schema: Mapping[str, Any], where: str, depth: int) -> str | None:
        if not isinstance(value, dict):
            return None
        for name in _list(schema.get("required")):
            if isinstance(name, str) and name not in value:
                return f"{where} lacks {name!r}"
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        for name, member in value.items():
            if found := self.problem(member, properties.get(name, others), f"{where}.{name}", depth + 1):
                return found
        return None

    def _item_problem(self, value: Any, schema: Mapping[str, Any], where: str, depth: int) -> str | None:
        if not isinstance(value, list):
            return None
        firsts = _list(schema.get("prefixItems"))
        for i, item in enumerate(value):
            part = firsts[i] if i < len(firsts) else schema.get("items", True)
            if found := self.problem(item, part, f"{where}[{i}]", depth + 1):
                return found
        return None


def _own_problem(value: Any, schema: Mapping[str, Any], where: str) -> str | None:
    """Check the keywords that concern the value alone, not its members."""
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else _list(kinds)
    if kinds and not any(_is_a(value, kind) for kind in kinds):
        return f"{where} is not of type {' or '.join(map(str, kinds))}"
    if "const" in schema and not _same(value, schema["const"]):
        return f"{where} is not {schema['const']!r}"
    if isinstance(schema.get("enum"), list) and not any(_same(value, choice) for choice in schema["enum"]):
        return f"{where} is not one of {schema['enum']!r}"
    return _limit_problem(value, schema, where)


def _limit_problem(value: Any, schema: Mapping[str, Any], where: str) -> str | None:
    if isinstance(value, (str, list)):
        low, high = ("minLength", "maxLength") if isinstance(value, str) else ("minItems", "maxItems")
        if len(value) < _number(schema.get(low), 0) or len(value) > _number(schema.get(high), len(value)):
            return f"{where} has the wrong length"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        outside = (
            value < _number(schema.get("minimum"), value)
            or value > _number(schema.get("maximum"), value)
            or value <= _number(schema.get("exclusiveMinimum"), float("-inf"))
            or value >= _number(schema.get("exclusiveMaximum"), float("inf"))
        )
        if outside:
            return f"{where} is out of range"
    return None


def _is_a(value: Any, kind: Any) -> bool:
    if isinstance(value, bool) and kind != "boolean":
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return not isinstance(kind, str) or kind not in _TYPES or isinstance(value, _TYPES[kind])


def _same(value: Any, other: Any) -> bool:
    """Equality as JSON: true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _resolve(root: Any, reference: str) -> Any:
    """The target of a reference within the schema. An unknown target allows everything."""
    if not reference.startswith("#"):
        return True
    found = root
    for step in filter(None, reference[1:].split("/")):
        name = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or name not in found:
            return True
        found = found[name]
    return found


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _number(value: Any, default: float) -> float:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else default
