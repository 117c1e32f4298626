"""Owns strict JSON reading and writing, and the search for the end of a JSON value that arrives in chunks."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

_OUTSIDE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


class JsonEnd:
    """Finds the end of an object or array by its brackets. `loads` decides whether the JSON is valid."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_escaped = False
        self.in_string = False

    def feed(self, text: str) -> int | None:
        """Take the next chunk. Once the last bracket has come: how many characters belong to the value."""
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
    """True if JSON text breaks off inside a string, so that the next text still belongs to the string."""
    end = JsonEnd()
    return end.feed(text) is None and end.in_string


def loads(text: str) -> Any:
    """Read strict JSON. Raises ValueError for anything else."""
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def dumps(value: Any) -> str:
    """Write JSON that can be sent as UTF-8. Raises ValueError for a value that JSON cannot express."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair: only an escape can express it
        return json.dumps(value, allow_nan=False)
    return text


def refuse_constant(name: str) -> NoReturn:
    """For `json.loads`, which accepts NaN and Infinity by default."""
    raise ValueError(f"{name} is not a JSON number")
