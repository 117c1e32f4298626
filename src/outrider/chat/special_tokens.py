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
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
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

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return str(self._tokenizer.decode(list(token_ids)))

    def ids_of(self, markers: Sequence[str]) -> tuple[int, ...]:
        """The ids of those markers that are added tokens."""
        return tuple(self.added[marker] for marker in markers if marker in self.added)


class SpecialTokenEscape:
    """Escapes the texts of some tokens in one conversation.

    `separator` is None if the conversation contains none of the tokens; then every method is the identity.
    """

    def __init__(self, tokens: frozenset[str], messages: Sequence[Mapping[str, Any]], others: Any) -> None:
        """`others`: everything else in the conversation that clients write."""
        self._tokens = tokens
        strings = [*strings_in([messages, others]), *map(_joined_parts, messages)]
        self.separator: str | None = None
        if any(_pattern(tokens).search(text) for text in strings):
            used = set().union(*strings)
            self.separator = next(chr(code) for code in _PRIVATE_USE if chr(code) not in used)

    def escape(self, value: Any, allowed: frozenset[str] = frozenset()) -> Any:
        """The same value with a separator inside each token's text, except for the allowed tokens."""
        if self.separator is None:
            return value
        pattern = _pattern(self._tokens - allowed)
        return _map_strings(value, lambda text: self._escape_texts(pattern, [text])[0])

    def escape_message(self, message: dict[str, Any], allowed: frozenset[str]) -> dict[str, Any]:
        """The same for a message. A template may join its text parts, so their joined text is escaped."""
        escaped: dict[str, Any] = self.escape(message, allowed)
        parts = message["content"]
        if self.separator is None or isinstance(parts, str):
            return escaped
        texts = self._escape_texts(_pattern(self._tokens - allowed), [part.get("text", "") for part in parts])
        both = zip(parts, texts, strict=True)
        escaped["content"] = [part | {"text": text} if "text" in part else part for part, text in both]
        return escaped

    def chunks(self, rendered: str) -> list[str]:
        """A rendered conversation, cut at the separators: each chunk is encoded by itself."""
        return [rendered] if self.separator is None else list(filter(None, rendered.split(self.separator)))

    def unescape(self, rendered: str) -> str:
        return rendered if self.separator is None else rendered.replace(self.separator, "")

    def _escape_texts(self, pattern: re.Pattern[str], texts: Sequence[str]) -> list[str]:
        """Cut each token of the joined texts after its first character.

        The search goes on from there: two tokens may overlap.
        """
        joined = "".join(texts)
        cuts: list[int] = []
        while found := pattern.search(joined, cuts[-1] if cuts else 0):
            cuts.append(found.start() + 1)
        escaped, start, num_done = [], 0, 0
        for end in accumulate(map(len, texts)):
            num_cut = bisect_right(cuts, end)
            bounds = [start, *cuts[num_done:num_cut], end]
            escaped.append((self.separator or "").join(joined[a:b] for a, b in pairwise(bounds)))
            start, num_done = end, num_cut
        return escaped


@lru_cache(maxsize=8)
def _pattern(tokens: frozenset[str]) -> re.Pattern[str]:
    """Matches any of the tokens, longer ones first.

    Tokens are grouped by their first two characters: a model may have hundreds of tokens like "<|…|>".
    """
    groups: dict[str, list[str]] = {}
    for token in sorted((token for token in tokens if len(token) > 1), key=len, reverse=True):
        groups.setdefault(token[:2], []).append(re.escape(token[2:]))
    return re.compile("|".join(f"{re.escape(s)}(?:{'|'.join(ends)})" for s, ends in groups.items()) or "(?!)")


def strings_in(value: Any) -> Iterable[str]:
    """All strings of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield from strings_in(key)
            yield from strings_in(member)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings_in(item)


def _joined_parts(message: Mapping[str, Any]) -> str:
    """The text parts of a message as one text."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, change): _map_strings(member, change) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value
