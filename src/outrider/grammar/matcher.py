"""Owns the grammar state of one row, on llguidance: masks for a verify window, and forced tokens.

Drafts never change the state: the matcher walks over the drafts to compute their masks, then rolls back.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import numpy as np

from outrider.grammar.backend import error_of
from outrider.request import InvalidRequest

# Processor time of one call of a matcher, after which its row ends: other rows wait meanwhile. Chosen by
# hand; common grammars take 1 ms. The grammar child refuses grammars that begin with slower calls.
MAX_CALL_S = 1.0

# How llguidance's message begins when a lexer has too many states or has built too many expressions in one
# step. It has no other sign of these errors. All matchers that share the lexer fail from then on.
LEXER_IS_FULL = "lexer error"

T = TypeVar("T")


class GrammarStuck(InvalidRequest):
    """The grammar cannot go on: it allows no token, not the committed one, or takes too much to compute."""


class CompiledGrammar:
    """A compiled grammar, for any number of rows. Thread-safe.

    Its matchers share a lexer. When that reaches one of its limits, the grammar is compiled again.
    """

    def __init__(self, compile: Callable[[], Any]) -> None:
        self._compile = compile
        self._lock = threading.Lock()
        self.root: Any = compile()

    def new_matcher(self, token_ids: Sequence[int]) -> Any:
        """The grammar after these tokens; in its error state if it does not allow them."""
        matcher = self.root.deep_copy()
        if token_ids:
            matcher.consume_tokens(list(token_ids))
        return matcher

    def replace(self, root: Any) -> None:
        """Compile again, unless another row has replaced this root already."""
        with self._lock:
            if self.root is root:
                self.root = self._compile()


class RowGrammar:
    """Waits for the tokens `after_ids` (the end of reasoning), if there are any; then constrains the row.

    committed   … x x x | pending
    window                pending  d1  d2  d3     masks: after pending, after d1, …
    """

    needs_host = True

    def __init__(
        self,
        compiled: CompiledGrammar,
        vocab_size: int,
        eos_ids: Collection[int],
        after_ids: Sequence[int] = (),
        mask_after_end: np.ndarray | None = None,
    ) -> None:
        """`mask_after_end`: the tokens that may follow a draft that ends the grammar; None: only EOS."""
        self._mask_after_end = mask_after_end
        self._compiled = compiled
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._after_ids = list(after_ids)
        self._tail: list[int] = []  # while waiting: the last committed tokens
        self._is_waiting = bool(after_ids)
        self._committed: list[int] = []  # since the grammar began
        self._slowest_s = 0.0  # processor time of the slowest call of a matcher
        self._reset()

    @property
    def is_restricting(self) -> bool:
        """True if `masks` has a mask for the next token."""
        return not self._is_waiting

    def copy(self) -> RowGrammar:
        """The same grammar at its start, for another row. Only before the first commit."""
        return RowGrammar(
            self._compiled, self._vocab_size, self._eos_ids, self._after_ids, self._mask_after_end
        )

    def commit(self, token_id: int) -> None:
        """Take a committed token. Raises GrammarStuck."""
        if self._is_waiting:
            self._tail = [*self._tail, token_id][-len(self._after_ids) :]
            self._is_waiting = self._tail != self._after_ids
            return
        if self._slowest_s > MAX_CALL_S:
            raise GrammarStuck(
                "the grammar is too complex: the tokens allowed at one position took "
                f"{self._slowest_s:.1f} s to compute, and the limit is {MAX_CALL_S:g} s"
            )
        _, error = self._call(lambda matcher: self._timed(matcher.consume_token, token_id))
        if error:
            raise GrammarStuck(f"the grammar does not allow token {token_id}: {error}")
        self._committed.append(token_id)

    def start(self, token_ids: Sequence[int]) -> bool:
        """Begin the grammar after these tokens. False if the grammar does not allow them."""
        self._committed = list(token_ids)
        self._reset()
        return not self._matcher.is_error()

    @property
    def has_ended(self) -> bool:
        """True if nothing can follow but EOS."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """The number of leading drafts that the grammar allows.

        While waiting, drafts before the token that ends the waiting are allowed. An EOS token is never
        allowed as a draft: nothing follows it, and the matcher cannot roll back over it.
        """
        if not self._is_waiting:
            usable = list(itertools.takewhile(self._is_usable, drafts))
            if not usable:
                return 0
            found, error = self._call(lambda matcher: self._timed(matcher.validate_tokens, usable))
            return 0 if error else int(found)
        tail = list(self._tail)
        for i, draft in enumerate(drafts):
            tail = [*tail, draft][-len(self._after_ids) :]
            if tail == self._after_ids:
                return i
        return len(drafts)

    def masks(self, drafts: Sequence[int]) -> np.ndarray | None:
        """One bit per token, for the position after the pending token and after each (allowed) draft.

        uint32 [1 + drafts, words]; None while waiting: all tokens are allowed. Fewer rows if the grammar
        fails after one of the drafts: the drafts from there on must not be fed. Raises GrammarStuck if it
        fails after the pending token.
        """
        if self._is_waiting:
            return None
        found, error = self._call(lambda matcher: self._window(matcher, drafts))
        if not found:
            raise GrammarStuck(f"the grammar allows no token here: {error or 'it has no way on'}")
        return np.stack(found)

    def forced(self, max_tokens: int) -> list[int]:
        """The tokens that the grammar forces next, at most `max_tokens` of them."""
        if self._is_waiting or max_tokens <= 0 or self._matcher.is_stopped():
            return []
        found, error = self._call(lambda matcher: self._timed(matcher.compute_ff_tokens))
        return [] if error else list(itertools.takewhile(self._is_usable, found))[:max_tokens]

    def _is_usable(self, draft: int) -> bool:
        return draft not in self._eos_ids and draft < self._vocab_size

    def _call(self, work: Callable[[Any], T]) -> tuple[T, str]:
        """The result of `work`, and the matcher's error or "". After an error the matcher is as before."""
        result = work(self._matcher)
        if self._is_lexer_full():
            self._renew()
            result = work(self._matcher)
        if not self._matcher.is_error():
            return result, ""
        error = error_of(self._matcher)
        if self._is_lexer_full():  # by this call alone: other rows must not get this lexer
            self._renew()
        else:
            self._reset()
        return result, error

    def _is_lexer_full(self) -> bool:
        return self._matcher.is_error() and error_of(self._matcher).startswith(LEXER_IS_FULL)

    def _renew(self) -> None:
        self._compiled.replace(self._root)
        self._reset()

    def _window(self, matcher: Any, drafts: Sequence[int]) -> list[np.ndarray]:
        """The masks after the pending token and after each draft, until the matcher fails or allows no token.

        Each position is timed alone: whether a row ends must not depend on the number of its drafts.
        """
        masks: list[np.ndarray] = []
        num_walked = 0
        while True:
            mask = np.frombuffer(self._timed(matcher.compute_bitmask), np.uint32)
            mask = mask & ids_of_model(len(mask), self._vocab_size)
            if matcher.is_error() or not mask.any():
                break
            masks.append(mask)
            if num_walked == len(drafts) or not self._timed(matcher.consume_token, drafts[num_walked]):
                break
            num_walked += 1
            if self._mask_after_end is not None and matcher.is_stopped() and not matcher.is_error():
                masks.append(self._mask_after_end)
                break
        if num_walked and not matcher.is_error():
            matcher.rollback(num_walked)
        return masks

    def _timed(self, method: Callable[..., T], *args: Any) -> T:
        started_s = time.thread_time()
        result = method(*args)
        self._slowest_s = max(self._slowest_s, time.thread_time() - started_s)
        return result

    def _reset(self) -> None:
        """A new matcher, at the place of the old one: a matcher never leaves its error state."""
        self._root = self._compiled.root
        self._matcher = self._root.deep_copy()
        if self._committed:
            self._matcher.consume_tokens(self._committed)


@functools.cache
def ids_of_model(num_words: int, vocab_size: int) -> np.ndarray:
    """The mask of the model's ids: a tokenizer may have more ids than the model."""
    return np.packbits(np.arange(num_words * 32) < vocab_size, bitorder="little").view(np.uint32)
