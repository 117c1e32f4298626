"""What a line of a server-sent stream of OpenAI's API says; for whoever reads a server's answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

Done = Literal["done"]


class NoChunk(ValueError):
    """A data line that holds no JSON object."""


def read_line(line: bytes) -> Mapping[str, Any] | Done | None:
    """A chunk, the end, or None: comments keep a stream alive and say nothing. Raises NoChunk."""
    field, _, value = line.strip().partition(b":")
    if field != b"data":
        return None
    if value.strip() == b"[DONE]":
        return "done"
    try:
        chunk = json.loads(value)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise NoChunk("the server sent a chunk that is no JSON object")
    return chunk
