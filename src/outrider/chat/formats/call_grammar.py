"""Owns the elements that describe how a format writes one call, for grammars that force a call.

Must not know the syntax of any grammar.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JsonValue:
    """A JSON value under a schema."""

    schema: Mapping[str, Any]
    is_strict: bool = True  # False: keywords that the grammar does not know are ignored


@dataclass(frozen=True)
class FreeText:
    """Any text up to and including `until`."""

    until: str


@dataclass(frozen=True)
class OneOf:
    """One of these texts."""

    choices: tuple[str, ...]


@dataclass(frozen=True)
class OptionalElements:
    elements: tuple[RequiredElement, ...]


RequiredElement = str | JsonValue | FreeText | OneOf  # a str is literal text
Element = RequiredElement | OptionalElements
CallGrammar = tuple[Element, ...]
