"""What the chat layer knows of a tokenizer: which texts are tokens of their own, and plain encoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Vocabulary:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        tokens = tokenizer.added_tokens_decoder
        self.added: dict[str, int] = {token.content: token_id for token_id, token in tokens.items()}
        self.special = frozenset(token.content for token in tokens.values() if token.special)

    def encode(self, text: str) -> list[int]:
        """The ids of a text as it stands: nothing is put before or after it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a bare prompt, with what the tokenizer puts before it."""
        return list(self._tokenizer.encode(text))

    def ids_of(self, markers: Sequence[str]) -> tuple[int, ...]:
        """The ids of those markers that are tokens of their own."""
        return tuple(self.added[marker] for marker in markers if marker in self.added)
