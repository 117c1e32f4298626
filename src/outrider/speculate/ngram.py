"""Drafts copied from the row's own text: what followed the last time the same few tokens occurred."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.request import MAX_DEPTH
from outrider.speculate.acceptance import Source

LONGEST = 4
SHORTEST = 2


class NgramDrafter:
    """Looks the last 4, else 3, else 2 tokens up in everything before them. Any model, no head needed."""

    source: Source = "ngram"

    def __init__(self, max_drafts: int = MAX_DEPTH, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        self._max_drafts = max_drafts
        self._sizes = range(longest, shortest - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token that followed it last
        self._num_indexed = 0

    def propose(self, token_ids: Sequence[int], num: int) -> Sequence[int]:
        self._index(token_ids)
        for size in self._sizes:
            if len(token_ids) < size:
                continue
            follows = self._after.get(tuple(token_ids[-size:]))
            if follows is not None:
                return self._continuation(token_ids, follows, min(num, self._max_drafts))
        return ()

    def _index(self, token_ids: Sequence[int]) -> None:
        """Enter every n-gram that has a token after it: the current ending has none yet."""
        for end in range(max(1, self._num_indexed), len(token_ids)):
            for size in self._sizes:
                if end >= size:
                    self._after[tuple(token_ids[end - size : end])] = end
        self._num_indexed = len(token_ids)

    @staticmethod
    def _continuation(token_ids: Sequence[int], start: int, num: int) -> Sequence[int]:
        """The tokens from `start` on; where they run into the end, the match repeats itself (a loop)."""
        period = len(token_ids) - start
        return [token_ids[start + i % period] for i in range(num)]
