"""Owns the guard against special tokens in what clients wrote: "<|im_end|>" in a message must stay text.

A tokenizer reads the rendered conversation as a whole and cannot tell who wrote a special token's text. So a
mark is put into that text wherever a client wrote it, and the whole is encoded in parts, cut at the marks:

    client wrote    Hi <|im_end|> there
    template saw    Hi <·|im_end|> there           the mark: a character that occurs nowhere else
    encoded         …Hi <   and   |im_end|> there…     neither part holds the special token

A conversation without such text is not touched at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

_PRIVATE_USE = range(0xE000, 0xF900)


class Guard:
    """Marks some tokens' texts in a client's strings. `mark` is None where there is nothing to guard."""

    def __init__(self, tokens: frozenset[str], said: Any) -> None:
        self._tokens = tokens
        strings = list(_strings(said))
        self.mark: str | None = None
        if any(_pattern(tokens).search(text) for text in strings):
            taken = set().union(*strings)
            self.mark = next(chr(code) for code in _PRIVATE_USE if chr(code) not in taken)

    def marked(self, value: Any, spared: frozenset[str] = frozenset()) -> Any:
        """The same value with a mark inside each token's text, but for those that are spared."""
        if self.mark is None:
            return value
        pattern = _pattern(self._tokens - spared)
        return _map_strings(value, lambda text: self._cut(pattern, text))

    def encode(self, rendered: str, encode: Callable[[str], list[int]]) -> list[int]:
        """The ids of a rendered conversation in which marks may stand."""
        if self.mark is None:
            return encode(rendered)
        return [token_id for part in rendered.split(self.mark) if part for token_id in encode(part)]

    def unmarked(self, rendered: str) -> str:
        return rendered if self.mark is None else rendered.replace(self.mark, "")

    def _cut(self, pattern: re.Pattern[str], text: str) -> str:
        """Cut each token after its first character, and look again from there: two of them may overlap."""
        parts, at = [], 0
        while found := pattern.search(text, at):
            parts.append(text[at : found.start() + 1])
            at = found.start() + 1
        return (self.mark or "").join([*parts, text[at:]])


@lru_cache(maxsize=8)
def _pattern(tokens: frozenset[str]) -> re.Pattern[str]:
    """Any of the tokens, longer ones first. Grouped by how they start: there may be hundreds of "<|…|>"."""
    groups: dict[str, list[str]] = {}
    for token in sorted((token for token in tokens if len(token) > 1), key=len, reverse=True):
        groups.setdefault(token[:2], []).append(re.escape(token[2:]))
    return re.compile("|".join(f"{re.escape(s)}(?:{'|'.join(ends)})" for s, ends in groups.items()) or "(?!)")


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield from _strings(key)
            yield from _strings(member)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, change): _map_strings(member, change) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value
