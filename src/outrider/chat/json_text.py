"""Owns JSON as text that arrives in pieces: where a value ends, and strict reading and writing.

Must not know what the JSON is about.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

_OUTSIDE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


class JsonEnd:
    """Finds where an object or array ends. It trusts brackets; whether the JSON is sound `loads` says."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_escaped = False
        self.in_string = False

    def feed(self, text: str) -> int | None:
        """Take the next piece; how much of it belongs to the value, once its last bracket has come."""
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_IN_STRING if self.in_string else _OUTSIDE).search(text, at)
            if found is None:
                return None
            at = found.end()
            self._take(found.group())
            if self._depth == 0 and not self.in_string:
                return at
        return None

    def _take(self, character: str) -> None:
        if character == "\\":
            self._is_escaped = True
        elif character == '"':
            self.in_string = not self.in_string
        else:
            self._depth += 1 if character in "{[" else -1


def ends_in_string(text: str) -> bool:
    """Whether JSON text breaks off inside a string, so that what follows still belongs to the string."""
    end = JsonEnd()
    return end.feed(text) is None and end.in_string


def loads(text: str) -> Any:
    """Read strict JSON. Anything else is a ValueError, whatever is wrong with it."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def dumps(value: Any) -> str:
    """Write JSON that can be sent as UTF-8. ValueError where there is no JSON for the value."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can carry
        return json.dumps(value, allow_nan=False)
    return text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
