"""Tokens as clients see them in logprobs: a string, and the bytes that it stands for.

A token can be part of a character: its string then shows the bytes as escapes, its bytes are exact.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

TORN = "\ufffd"
META_SPACE = "▁"  # SentencePiece's mark of a leading space
BYTE_SYMBOL = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.bytes_of = lru_cache(maxsize=65536)(self._bytes_of)

    def text_of(self, token_id: int) -> str:
        return self.bytes_of(token_id).decode("utf-8", errors="backslashreplace")

    def decode(self, token_ids: list[int]) -> str:
        """A prompt's text, for clients who gave ids and want it echoed."""
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _bytes_of(self, token_id: int) -> bytes:
        symbol = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        text = self.decode([token_id])
        if TORN in text:
            return _symbol_bytes(symbol) or text.encode()
        if symbol.startswith(META_SPACE) and not text.startswith(" "):
            text = " " + text  # dropped because it stood first
        return text.encode()


def _symbol_bytes(symbol: str) -> bytes | None:
    """What a byte-level or byte-fallback symbol stands for; None if it is neither."""
    match = BYTE_SYMBOL.fullmatch(symbol)
    if match:
        return bytes([int(match.group(1), 16)])
    if symbol and all(character in BYTE_OF for character in symbol):
        return bytes(BYTE_OF[character] for character in symbol)
    return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes are their own character, the others take those from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
