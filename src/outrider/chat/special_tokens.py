"""Owns a tokenizer's added tokens, and the escaping of their texts in client input.

"<|im_end|>" in a message must stay text. A tokenizer reads the whole rendered conversation and does not
know whether a client or the template wrote a special token's text. So a separator is put inside each such
text of a client, and the rendered conversation is encoded in chunks that are cut at the separators:

    client wrote    Hi <|im_end|> there
    template gets   Hi <·|im_end|> there               ·: the separator, a character that occurs nowhere else
    encoded         …Hi <   and   |im_end|> there…     neither chunk contains the special token

A conversation without such text is not changed at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

_PRIVATE_USE = range(0xE000, 0xF900)


class Vocabulary:
    """The added tokens of a tokenizer, and plain encoding."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        tokens = tokenizer.added_tokens_decoder
        self.added: dict[str, int] = {token.content: token_id for token_id, token in tokens.items()}
        self.special = frozenset(token.content for token in tokens.values() if token.special)

    def encode(self, text: str) -> list[int]:
        """Encode a text without the tokens that a tokenizer adds before and after a prompt."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a bare prompt, with the tokens that the tokenizer adds (such as BOS)."""
        return list(self._tokenizer.encode(text))

    def ids_of(self, markers: Sequence[str]) -> tuple[int, ...]:
        """The ids of those markers that are added tokens."""
        return tuple(self.added[marker] for marker in markers if marker in self.added)


class SpecialTokenEscape:
    """Escapes the texts of some tokens in one conversation.

    `separator` is None if the conversation contains none of the tokens; then every method is the identity.
    """

    def __init__(self, tokens: frozenset[str], conversation: Any) -> None:
        self._tokens = tokens
        strings = list(_strings(conversation))
        self.separator: str | None = None
        if any(_pattern(tokens).search(text) for text in strings):
            used = set().union(*strings)
            self.separator = next(chr(code) for code in _PRIVATE_USE if chr(code) not in used)

    def escape(self, value: Any, allowed: frozenset[str] = frozenset()) -> Any:
        """The same value with a separator inside each token's text, except for the allowed tokens."""
        if self.separator is None:
            return value
        pattern = _pattern(self._tokens - allowed)
        return _map_strings(value, lambda text: self._escape_text(pattern, text))

    def encode(self, rendered: str, encode: Callable[[str], list[int]]) -> list[int]:
        """The token ids of a rendered conversation that may contain separators."""
        if self.separator is None:
            return encode(rendered)
        return [token_id for chunk in rendered.split(self.separator) if chunk for token_id in encode(chunk)]

    def unescape(self, rendered: str) -> str:
        return rendered if self.separator is None else rendered.replace(self.separator, "")

    def _escape_text(self, pattern: re.Pattern[str], text: str) -> str:
        """Cut each token after its first character and search again from there: two tokens may overlap."""
        chunks, at = [], 0
        while found := pattern.search(text, at):
            chunks.append(text[at : found.start() + 1])
            at = found.start() + 1
        return (self.separator or "").join([*chunks, text[at:]])


@lru_cache(maxsize=8)
def _pattern(tokens: frozenset[str]) -> re.Pattern[str]:
    """Matches any of the tokens, longer ones first.

    Tokens are grouped by their first two characters: a model may have hundreds of tokens like "<|…|>".
    """
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
