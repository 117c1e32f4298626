"""Tokens as OpenAI's APIs write them: log-probabilities, with each token as a string and as exact bytes.

Also the origins of tokens, an extension.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from outrider.chat.events import TokenDetail
from outrider.plan import TokenLogprobs

REPLACEMENT = "\ufffd"  # a tokenizer decodes an incomplete UTF-8 character as this one
META_SPACE = "▁"  # SentencePiece's symbol for a leading space
BYTE_SYMBOL = re.compile(r"<0x([0-9A-Fa-f]{2})>")
MIN_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON cannot express


class TokenText:
    """The text of single tokens. Bytes of an incomplete character are shown as escapes such as \\xc3."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.bytes_of = lru_cache(maxsize=65536)(self._bytes_of)

    def text_of(self, token_id: int) -> str:
        return self.bytes_of(token_id).decode("utf-8", errors="backslashreplace")

    def decode(self, token_ids: list[int]) -> str:
        """The text of a prompt that the client sent as token ids and wants echoed."""
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def symbols(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary writes them; "" for an id without a token."""
        return [self._tokenizer.convert_ids_to_tokens(token_id) or "" for token_id in token_ids]

    def _bytes_of(self, token_id: int) -> bytes:
        symbol = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        text = self.decode([token_id])
        if REPLACEMENT in text:
            return _symbol_bytes(symbol) or text.encode()
        if symbol.startswith(META_SPACE) and not text.startswith(" "):
            text = " " + text  # the decoder drops the space of the first token
        return text.encode()


def chat_logprobs(tokens: Sequence[TokenLogprobs], text: TokenText) -> list[dict[str, Any]]:
    """One entry per token, with the most likely alternatives at its position."""
    return [
        {
            **_entry(token.token_id, token.logprob, text),
            "top_logprobs": [_entry(token_id, logprob, text) for token_id, logprob in token.top],
        }
        for token in tokens
    ]


def token_origins(details: Sequence[TokenDetail], text: TokenText) -> list[dict[str, Any]]:
    """One entry per token: its text, how it was won, and its log-probability if there is one."""
    entries = []
    for detail in details:
        entry: dict[str, Any] = {"token": text.text_of(detail.token_id), "origin": detail.origin.name}
        if detail.origin.place is not None:
            entry["place"] = detail.origin.place
        if detail.logprob is not None:
            entry["logprob"] = max(detail.logprob, MIN_LOGPROB)
        entries.append(entry)
    return entries


def _entry(token_id: int, logprob: float, text: TokenText) -> dict[str, Any]:
    return {
        "token": text.text_of(token_id),
        "logprob": max(logprob, MIN_LOGPROB),
        "bytes": list(text.bytes_of(token_id)),
    }


def _symbol_bytes(symbol: str) -> bytes | None:
    """The bytes of a byte-level or byte-fallback symbol; None for any other symbol."""
    match = BYTE_SYMBOL.fullmatch(symbol)
    if match:
        return bytes([int(match.group(1), 16)])
    if symbol and all(character in BYTE_OF for character in symbol):
        return bytes(BYTE_OF[character] for character in symbol)
    return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte-level alphabet: a printable byte is its own character, the others start at U+0100."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
