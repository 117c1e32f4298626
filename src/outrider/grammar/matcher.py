"""Owns the grammar state of one row, on llguidance: masks for a verify window, and forced tokens.

Drafts never change the state: the matcher walks over the drafts to compute their masks, then rolls back.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np


class GrammarStuck(RuntimeError):
    """The grammar does not allow a committed token, or allows no token at all."""


class RowGrammar:
    """Waits for the tokens `after_ids` (the end of reasoning), if there are any; then constrains the row.

    committed   … x x x | pending
    window                pending  d1  d2  d3     masks: after pending, after d1, …
    """

    def __init__(self, matcher: Any, eos_ids: Collection[int], after_ids: Sequence[int] = ()) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._after_ids = list(after_ids)
        self._tail: list[int] = []  # while waiting: the last committed tokens
        self._is_waiting = bool(after_ids)

    def copy(self) -> RowGrammar:
        """The same grammar at its start, for another row. Only before the first commit."""
        return RowGrammar(self._matcher.deep_copy(), self._eos_ids, self._after_ids)

    def commit(self, token_id: int) -> None:
        """Take a committed token."""
        if self._is_waiting:
            self._tail = [*self._tail, token_id][-len(self._after_ids) :]
            self._is_waiting = self._tail != self._after_ids
        elif not self._matcher.consume_token(token_id):
            raise GrammarStuck(f"the grammar does not allow token {token_id}: {self._matcher.get_error()}")

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """The number of leading drafts that the grammar allows.

        While waiting, drafts before the token that ends the waiting are allowed. An EOS token is never
        allowed as a draft: nothing follows it, and the matcher cannot roll back over it.
        """
        if not self._is_waiting:
            before_end = list(itertools.takewhile(lambda draft: draft not in self._eos_ids, drafts))
            return int(self._matcher.validate_tokens(before_end)) if before_end else 0
        tail = list(self._tail)
        for i, draft in enumerate(drafts):
            tail = [*tail, draft][-len(self._after_ids) :]
            if tail == self._after_ids:
                return i
        return len(drafts)

    def masks(self, drafts: Sequence[int]) -> np.ndarray | None:
        """One bit per token, for the position after the pending token and after each (allowed) draft.

        uint32 [1 + drafts, words]; None while waiting: all tokens are allowed.
        """
        if self._is_waiting:
            return None
        rows = [self._mask()]
        num_walked = 0
        try:
            for draft in drafts:
                if not self._matcher.consume_token(draft):
                    raise GrammarStuck(f"draft {draft} was not allowed")
                num_walked += 1
                rows.append(self._mask())
        finally:
            if num_walked:
                self._matcher.rollback(num_walked)
        return np.stack(rows)

    def can_begin(self) -> bool:
        """True if any token except EOS is allowed now."""
        allowed = np.unpackbits(self._mask().view(np.uint8), bitorder="little").nonzero()[0]
        return not set(allowed.tolist()) <= set(self._eos_ids)

    def forced(self, max_tokens: int) -> list[int]:
        """The tokens that the grammar forces next, at most `max_tokens` of them."""
        if self._is_waiting or max_tokens <= 0 or self._matcher.is_stopped():
            return []
        return list(self._matcher.compute_ff_tokens())[:max_tokens]

    def _mask(self) -> np.ndarray:
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        if not mask.any():
            raise GrammarStuck(f"the grammar allows no token here: {self._matcher.get_error()}")
        return mask
