"""Pictures and the engine's time: whose turn it is, decoding's or encoding's. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class ImageEmbeddings(Protocol):
    """Where encoded pieces lie, by key: see cache/embedding_cache.py."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def num_hits(self) -> int: ...  # pieces that were there when a row came to need them

    def __contains__(self, key: object) -> bool: ...

    def hold(self, keys: Iterable[str]) -> None: ...

    def release(self, keys: Iterable[str]) -> None: ...

    def forget_holds(self) -> None: ...


class EncodingTurns:
    """While rows decode, encoding gets at most half of the time: after a piece, as much goes to steps."""

    def __init__(self) -> None:
        self._owed_s = 0.0  # to the steps

    def may_encode(self, num_decoding: int) -> bool:
        return num_decoding == 0 or self._owed_s <= 0

    def encoded(self, seconds: float) -> None:
        self._owed_s = seconds

    def stepped(self, seconds: float) -> None:
        self._owed_s -= seconds
