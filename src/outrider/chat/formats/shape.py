"""The shape of a call, for grammars: literal text, JSON under a schema, free text. Knows no syntax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JsonOf:
    """A JSON value under a schema."""

    schema: Mapping[str, Any]
    is_strict: bool = True  # False: keywords that the grammar does not know are passed over


@dataclass(frozen=True)
class FreeText:
    """Anything, up to and with this text."""

    until: str


@dataclass(frozen=True)
class OneOf:
    """One of these texts."""

    choices: tuple[str, ...]


@dataclass(frozen=True)
class Maybe:
    parts: tuple[Sure, ...]


Sure = str | JsonOf | FreeText | OneOf
Part = Sure | Maybe
Shape = tuple[Part, ...]
