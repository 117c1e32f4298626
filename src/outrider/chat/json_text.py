"""Owns strict JSON reading and writing, and the search for the end of a JSON value that arrives in chunks."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any, NoReturn

MAX_DEPTH = 100  # nested lists and objects of a value that is read; chosen by hand: clients can send it back

_OUTSIDE = re.compile(r'["{}\[\]]')
_OUTSIDE_PYTHON = re.compile(r"""["'{}\[\]]""")
_IN_STRING = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}


class JsonEnd:
    """Finds the end of an object or array by its brackets. `loads` decides whether the JSON is valid.

    With `is_python`, strings may be in single quotes too.
    """

    def __init__(self, is_python: bool = False) -> None:
        self._outside = _OUTSIDE_PYTHON if is_python else _OUTSIDE
        self._depth = 0
        self._is_escaped = False
        self._quote = ""  # of the string that is open

    @property
    def in_string(self) -> bool:
        return bool(self._quote)

    def feed(self, text: str) -> int | None:
        """Take the next chunk. Once the last bracket has come: how many characters belong to the value."""
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_IN_STRING[self._quote] if self._quote else self._outside).search(text, at)
            if found is None:
                return None
            at = found.end()
            self._take(found.group())
            if self._depth == 0 and not self._quote:
                return at
        return None

    def _take(self, character: str) -> None:
        if character == "\\":
            self._is_escaped = True
        elif character in "\"'":
            self._quote = "" if self._quote else character
        else:
            self._depth += 1 if character in "{[" else -1


def ends_in_string(text: str) -> bool:
    """True if JSON text breaks off inside a string, so that the next text still belongs to the string."""
    end = JsonEnd()
    return end.feed(text) is None and end.in_string


def loads(text: str) -> Any:
    """Read strict JSON that `dumps` can write again. Raises ValueError for anything else."""
    try:
        value = json.loads(text, parse_constant=refuse_constant, parse_float=parse_float)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if text.count("[") + text.count("{") > MAX_DEPTH and is_nested_deeper(value, MAX_DEPTH):
        raise ValueError("nested too deeply")
    return value


def is_nested_deeper(value: Any, most: int) -> bool:
    """True if a JSON value has more than so many lists and objects inside one another."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(most):
        members = (member for outer in level for member in members_of(outer))
        level = [member for member in members if isinstance(member, (dict, list))]
        if not level:
            return False
    return bool(level)


def members_of(outer: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return outer.values() if isinstance(outer, dict) else outer


def dumps(value: Any) -> str:
    """Write JSON that can be sent as UTF-8. Raises ValueError for a value that JSON cannot express."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"not a JSON value: {error}") from error
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair: only an escape can express it
        return json.dumps(value, allow_nan=False)
    return text


def parse_float(text: str) -> float:
    """For `json.loads`, which reads 1e999 as infinity."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is too large a number")
    return number


def refuse_constant(name: str) -> NoReturn:
    """For `json.loads`, which accepts NaN and Infinity by default."""
    raise ValueError(f"{name} is not a JSON number")
