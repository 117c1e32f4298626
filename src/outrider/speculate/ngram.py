"""N-gram lookup: drafts are the tokens that followed the last occurrence of the row's last few tokens."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.request import MAX_DEPTH
from outrider.speculate.confidence import MATCHES
from outrider.speculate.drafter import Proposal

MAX_NGRAM, MIN_NGRAM = 4, 2  # tokens that have to match; chosen by hand
MAX_MATCH = int(MATCHES.limits[-1])  # of a longer match nothing more is known
NGRAM_SIZES = range(MAX_NGRAM, MIN_NGRAM - 1, -1)  # the longest match is the best
MAX_INDEXED = 1024  # tokens at once, a millisecond or two: all rows wait meanwhile; chosen by hand


class NgramDrafter:
    """Looks the last 4, else 3, else 2 tokens up in the text before them. Works for every model."""

    def __init__(self, max_drafts: int = MAX_DEPTH) -> None:
        self._max_drafts = max_drafts
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its last occurrence
        self._num_indexed = 0

    def propose(self, token_ids: Sequence[int], num: int) -> Proposal | None:
        num = min(num, self._max_drafts)
        self._index(token_ids)
        if tuple(token_ids[-MIN_NGRAM:]) not in self._after or num < 1:
            return None  # the usual case: no longer n-gram is there either
        for size in NGRAM_SIZES:
            start = self._after.get(tuple(token_ids[-size:])) if len(token_ids) >= size else None
            if start is not None:
                # Where the copied text reaches the end of the row's text, it starts again: a loop.
                period = len(token_ids) - start
                match = _match(token_ids, start, size)
                drafts = [token_ids[start + i % period] for i in range(num)]
                return Proposal("ngram", drafts, confidence=range(match, match + num))
        return None

    def _index(self, token_ids: Sequence[int]) -> None:
        """Enter the next n-grams that have a token after them. The last one has none yet."""
        num_indexed = min(len(token_ids), self._num_indexed + MAX_INDEXED)
        for end in range(max(1, self._num_indexed), num_indexed):
            for size in NGRAM_SIZES:
                if end >= size:
                    self._after[tuple(token_ids[end - size : end])] = end
        self._num_indexed = num_indexed


def _match(token_ids: Sequence[int], start: int, size: int) -> int:
    """How many tokens before `start` equal the last ones, of which `size` are known to. At most MAX_MATCH."""
    most = min(start, MAX_MATCH)
    while size < most and token_ids[start - size - 1] == token_ids[-size - 1]:
        size += 1
    return size
