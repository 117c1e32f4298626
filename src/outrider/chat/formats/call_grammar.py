"""Owns the elements that describe how a format writes one call, for the grammars of calls.

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
class Pattern:
    """Text that matches a regular expression."""

    expression: str
    example: str  # a text that matches


@dataclass(frozen=True)
class OptionalElements:
    elements: tuple[RequiredElement, ...]


@dataclass(frozen=True)
class Separated:
    """Items in this order, with a separator between any two that are written."""

    items: tuple[tuple[tuple[RequiredElement, ...], bool], ...]  # elements, and True if they must be written
    separator: str


@dataclass(frozen=True)
class Repeated:
    """Any number of items of one kind, with a separator between them."""

    item: tuple[RequiredElement, ...]
    separator: str


RequiredElement = str | JsonValue | FreeText | OneOf | Pattern | Separated | Repeated  # a str is literal text
Element = RequiredElement | OptionalElements
CallGrammar = tuple[Element, ...]

NEWLINE = Pattern(r"\n?", "\n")  # some models of a family write a line break here, others do not
