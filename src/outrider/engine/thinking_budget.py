"""Owns the thinking budget of one row: counts the tokens of its reasoning and forces the end at the budget.

    before ── opening ──> inside ── closing ──> past            the model ends its reasoning itself
                            │ budget used up
                            └──> closing: close_ids, one by one ──> reopening: one position ──> past

A grammar that holds the row inside its reasoning, such as that of a call, goes first: the end waits for it.
What a row may sample at a position depends on the tokens before that position only. So drafts, chunks,
neighbours and preemptions change nothing: a draft is followed as if it were committed. Markers are looked for
in the text of the tokens, as the parser of the answer does: a marker may be cut into tokens in several ways.
Pure Python.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import Literal

import numpy as np

from outrider.answer_form import ReasoningMarks
from outrider.engine.draft_state import TokenGrammar
from outrider.request import MAX_DEPTH, InvalidRequest

Phase = Literal["before", "inside", "closing", "reopening", "past"]

# Tokens that a row may gain in two steps. With so many left, no position of the next two steps is forced.
TWO_STEPS = 2 * (MAX_DEPTH + 1)
ALL_TOKENS = np.uint32(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an answer stands after some of its tokens."""

    phase: Phase
    num: int = 0  # tokens of reasoning so far; in the phase "closing", forced tokens so far
    tail: str = ""  # the end of the text, as far as it may be the start of a marker


PAST = Place("past")


class ThinkingRule:
    """The places of an answer, as a function of its tokens."""

    def __init__(self, marks: ReasoningMarks, budget: int, token_text: Callable[[int], str]) -> None:
        self.marks = marks
        self.budget = budget
        self._token_text = token_text
        self._longest_closing = max(map(len, marks.closings))

    def start(self) -> Place:
        return self._inside(0, "") if self.marks.starts_inside else Place("before")

    def after(self, place: Place, token_id: int) -> Place:
        """The place after one more token."""
        match place.phase:
            case "past" | "reopening":
                return PAST
            case "closing":
                return self._closing(place.num, token_id)
            case "before":
                return self._before(place.num, place.tail + self._token_text(token_id))
            case "inside":
                return self._inside(place.num, place.tail + self._token_text(token_id), num_new=1)

    def num_left(self, place: Place) -> int | None:
        """Tokens that may be sampled freely, at least; None: all further ones."""
        if place.phase == "past":
            return None
        return max(0, self.budget - place.num) if place.phase in ("before", "inside") else 0

    def _before(self, num: int, text: str) -> Place:
        opening = self.marks.opening
        if self.marks.may_repeat:
            found = text.find(opening)
            if found < 0:
                return Place("before", num, text[-len(opening) :])
            return self._inside(num, text[found + len(opening) :])
        text = text.lstrip()
        if text.startswith(opening):
            return self._inside(num, text[len(opening) :])
        return Place("before", num, text) if opening.startswith(text) else PAST

    def _inside(self, num: int, text: str, num_new: int = 0) -> Place:
        """Inside the reasoning after `num` tokens and new ones, unless a marker or the budget ends it."""
        found = [start for closing in self.marks.closings if (start := text.find(closing)) >= 0]
        if found:
            return self._before(num, text[min(found) :]) if self.marks.may_repeat else PAST
        num, tail = num + num_new, text[-self._longest_closing :]
        if num < self.budget or self._may_be_closing(num, tail):
            return Place("inside", num, tail)
        return Place("closing", 0, tail)

    def _may_be_closing(self, num: int, tail: str) -> bool:
        """True if the model is in the middle of a closing that is several tokens."""
        if not self.marks.splits_closing or num >= self.budget + self._longest_closing:
            return False
        ends = [tail[i:] for i in range(len(tail))]
        return any(closing.startswith(end) for closing in self.marks.closings for end in ends)

    def after_waiting(self, place: Place, token_id: int) -> Place:
        """The place after a token that came while the end of the reasoning had to wait."""
        return self._inside(self.budget, place.tail + self._token_text(token_id), num_new=1)

    def _closing(self, num: int, token_id: int) -> Place:
        close_ids = self.marks.close_ids
        if token_id != close_ids[num]:
            raise RuntimeError(f"token {token_id} came where {close_ids[num]} was forced: a fault in a mask")
        if num + 1 < len(close_ids):
            return Place("closing", num + 1)
        return Place("reopening") if self.marks.banned_ids else PAST


class ThinkingBudget:
    """The budget of one row, and the row's own grammar if it has one: a token has to satisfy both."""

    def __init__(self, rule: ThinkingRule, vocab_size: int, grammar: TokenGrammar | None = None) -> None:
        self._rule = rule
        self._num_words = -(-vocab_size // 32)
        self._grammar = grammar
        self._place = rule.start()

    @property
    def needs_host(self) -> bool:
        return self._is_near or (self._grammar is not None and self._grammar.needs_host)

    @property
    def is_restricting(self) -> bool:
        """True if `masks` has a mask for the next token."""
        return self.masks(()) is not None

    @property
    def _is_near(self) -> bool:
        """Whether one of the next two steps may be forced."""
        num_left = self._rule.num_left(self._place)
        return num_left is not None and num_left < TWO_STEPS

    def commit(self, token_id: int) -> None:
        after = self._rule.after_waiting if self._must_wait(self._place, ()) else self._rule.after
        if self._grammar is not None:
            self._grammar.commit(token_id)
        self._place = after(self._place, token_id)

    def num_allowed(self, drafts: Tokens[int]) -> int:
        """The number of leading drafts that may be accepted."""
        num = self._num_in_budget(drafts)
        return num if self._grammar is None else self._grammar.num_allowed(drafts[:num])

    def masks(self, drafts: Tokens[int]) -> np.ndarray | None:
        """As RowGrammar.masks: None if no position is restricted."""
        masks = None if self._grammar is None else self._grammar.masks(drafts)
        if not self._is_near:
            return masks
        own = [self._mask(place, drafts[:i]) for i, place in enumerate(self._places(drafts))]
        if all(mask is None for mask in own):
            return masks
        if masks is None:
            masks = np.full((len(own), self._num_words), ALL_TOKENS)
        for row, mask in zip(masks, own, strict=False):  # a grammar that fails has fewer rows
            if mask is not None:
                row[: self._num_words] &= mask
                row[self._num_words :] = 0
        num_open = next((i for i, row in enumerate(masks) if not row.any()), len(masks))
        if num_open == 0:
            raise InvalidRequest("the grammar does not allow the end of the reasoning at its budget")
        return masks[:num_open]

    def forced(self, most: int) -> list[int]:
        """The tokens that may come next and no others, at most `most` of them."""
        if self._place.phase == "closing" and not self._must_wait(self._place, ()):
            close_ids = list(self._rule.marks.close_ids[self._place.num :][:most])
            return close_ids if self._grammar is None else close_ids[: self._grammar.num_allowed(close_ids)]
        found = [] if self._grammar is None else self._grammar.forced(most)
        return found[: self._num_in_budget(found)]

    def _must_wait(self, place: Place, before: Tokens[int]) -> bool:
        """Whether the end is due after these drafts, and the grammar does not allow it there."""
        if self._grammar is None or place.phase != "closing" or place.num > 0:
            return False
        wanted = [*before, *self._rule.marks.close_ids]
        return self._grammar.masks(()) is not None and self._grammar.num_allowed(wanted) < len(wanted)

    def _num_in_budget(self, drafts: Tokens[int]) -> int:
        if not self._is_near:
            return len(drafts)
        marks, place = self._rule.marks, self._place
        for i, draft in enumerate(drafts):
            if self._must_wait(place, drafts[:i]):
                return i
            if place.phase == "closing" and draft != marks.close_ids[place.num]:
                return i
            if place.phase == "reopening" and draft in marks.banned_ids:
                return i
            place = self._rule.after(place, draft)
        return len(drafts)

    def _places(self, drafts: Tokens[int]) -> list[Place]:
        """The places at which the next token and the token after each (allowed) draft are sampled."""
        places = [self._place]
        for draft in drafts:
            places.append(self._rule.after(places[-1], draft))
        return places

    def _mask(self, place: Place, before: Tokens[int]) -> np.ndarray | None:
        """uint32 [words]; None: every token is allowed."""
        marks = self._rule.marks
        if self._must_wait(place, before):
            return None
        if place.phase == "closing":
            return self._bits([marks.close_ids[place.num]])
        return ~self._bits(marks.banned_ids) if place.phase == "reopening" else None

    def _bits(self, token_ids: Tokens[int]) -> np.ndarray:
        words = np.zeros(self._num_words, np.uint32)
        for token_id in token_ids:
            words[token_id // 32] |= np.uint32(1 << token_id % 32)
        return words
