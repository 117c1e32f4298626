"""Restricts a row to the tokens of `allowed_token_ids`: the simplest of the row's grammars. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WORD_BITS = 32  # tokens of one word of a mask


class AllowedTokens:
    """A TokenGrammar (engine/sequence.py) that allows the same tokens at every position."""

    needs_host = True
    is_restricting = True

    def __init__(self, token_ids: Sequence[int], vocab_size: int) -> None:
        self._token_ids = frozenset(token_ids)
        is_allowed = np.zeros(-(-vocab_size // WORD_BITS) * WORD_BITS, np.bool_)
        is_allowed[list(self._token_ids)] = True
        self._mask = np.packbits(is_allowed, bitorder="little").view(np.uint32)[None]  # [1, words]

    def commit(self, token_id: int) -> None:
        pass

    def num_allowed(self, drafts: Sequence[int]) -> int:
        return next((i for i, draft in enumerate(drafts) if draft not in self._token_ids), len(drafts))

    def masks(self, drafts: Sequence[int]) -> np.ndarray:
        return np.repeat(self._mask, 1 + len(drafts), axis=0)

    def forced(self, most: int) -> list[int]:
        return []
