"""Owns the lazy grammar of one row: asleep until a marker comes, then a RowGrammar, then asleep again.

While it sleeps, it costs a look at each committed token's text: no mask, no matcher. Drafts never change the
state. A draft that would wake the grammar is not fed, since the masks after it would be missing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from outrider.grammar.matcher import GrammarStuck, RowGrammar
from outrider.grammar.triggers import CompiledTriggers, Started, State

log = logging.getLogger(__name__)


class LazyRowGrammar:
    """The interface of RowGrammar. A grammar that gets stuck is given up: the rest of the answer is free."""

    needs_host = True  # any token may start a call

    def __init__(self, grammar: RowGrammar, triggers: CompiledTriggers) -> None:
        self._grammar = grammar  # never started: copied for each call
        self._triggers = triggers
        self._state: State = triggers.first
        self._awake: RowGrammar | None = None
        self._is_given_up = False

    def copy(self) -> LazyRowGrammar:
        """The same grammar at its start, for another row."""
        return LazyRowGrammar(self._grammar, self._triggers)

    @property
    def is_restricting(self) -> bool:
        """True if `masks` has a mask for the next token."""
        return self._awake is not None or self._mask(self._state) is not None

    def commit(self, token_id: int) -> None:
        if self._is_given_up:
            return
        if self._awake is not None:
            self._commit_awake(self._awake, token_id)
            return
        found = self._triggers.next_state(self._state, token_id)
        if isinstance(found, State):
            self._state = found
            return
        self._state = self._triggers.after_call
        grammar = self._grammar.copy()
        if grammar.start(found.token_ids) and not grammar.has_ended:
            self._awake = grammar

    def _commit_awake(self, grammar: RowGrammar, token_id: int) -> None:
        try:
            grammar.commit(token_id)
        except GrammarStuck as error:
            self._give_up(error)
            return
        if grammar.has_ended:
            self._awake = None

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """The number of leading drafts that may be fed: none after the end of a call."""
        if self._awake is not None:
            return self._awake.num_allowed(drafts)
        return len(self._states(drafts)) - 1

    def masks(self, drafts: Sequence[int]) -> np.ndarray | None:
        """As RowGrammar.masks. None also if no position of the window has a mask."""
        if self._awake is not None:
            try:
                return self._awake.masks(drafts)
            except GrammarStuck as error:
                if drafts:  # without them, the row may go on
                    raise
                self._give_up(error)
                return None
        found = [self._mask(state) for state in self._states(drafts)]
        if all(mask is None for mask in found):
            return None
        return np.stack([self._triggers.allow_all if mask is None else mask for mask in found])

    def forced(self, max_tokens: int) -> list[int]:
        return [] if self._awake is None else self._awake.forced(max_tokens)

    def _states(self, drafts: Sequence[int]) -> list[State]:
        """The states before the first draft and after each, up to one that would wake the grammar."""
        states = [self._state]
        for draft in () if self._is_given_up else drafts:
            mask = self._mask(states[-1])
            if mask is not None and not mask[draft // 32] >> (draft % 32) & 1:
                break
            found = self._triggers.next_state(states[-1], draft)
            if isinstance(found, Started):
                break
            states.append(found)
        else:
            states += [states[-1]] * (len(drafts) + 1 - len(states))  # given up: all are allowed
        return states

    def _mask(self, state: State) -> np.ndarray | None:
        return None if self._is_given_up else self._triggers.mask(state)

    def _give_up(self, error: GrammarStuck) -> None:
        log.warning("the rest of an answer is not under its tools' grammar: %s", error)
        self._awake = None
        self._is_given_up = True
