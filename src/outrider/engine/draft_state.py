"""The drafts of one row: what its drafters propose, what its grammar allows of it, what it feeds in a step.

How many drafts a row feeds, and of which proposal, is the planner's decision (draft_planner.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from outrider.request import MAX_DEPTH, InvalidRequest
from outrider.speculate.acceptance import RowAcceptance, Source
from outrider.speculate.drafter import Drafter, Proposal


class TokenGrammar(Protocol):
    """Restricts a row's tokens: see grammar/matcher.py, grammar/lazy.py and engine/thinking_budget.py."""

    @property
    def needs_host(self) -> bool:
        """Whether it may restrict one of the next two steps."""
        ...

    @property
    def is_restricting(self) -> bool:
        """Whether `masks` has a mask for the next token."""
        ...

    def commit(self, token_id: int) -> None: ...

    def num_allowed(self, drafts: Tokens[int]) -> int: ...

    def masks(self, drafts: Tokens[int]) -> np.ndarray | None: ...

    def forced(self, most: int) -> list[int]: ...


@dataclass(eq=False)
class DraftState:
    """After each commit `propose` collects proposals; before the next step the planner calls `use`."""

    max_depth: int = 0  # most drafts that the row may feed in a step, from any source
    head_depth: int = 0  # most drafts from the head, or the draft model; 0: it does not follow this row
    head_layers: int = 1  # a cell of the head depends on so many tokens after its own; a draft model's: 0
    head_context: int | None = None  # a draft model reads so many tokens at most; None: no such limit
    can_pause_head: bool = True  # the head is not fed while the controller wants no drafts from it
    stores_head_inputs: bool = False  # no head follows the row: it stores what other rows' heads may be fed
    is_auto: bool = False  # the controller chooses the depths, up to the limits above
    drafter: Drafter | None = None
    lookup: Drafter | None = None  # a second drafter: n-gram lookup beside the head
    grammar: TokenGrammar | None = None
    acceptance: RowAcceptance | None = None  # how this row's drafts have fared; made by the controller
    num_drafts_next: int = 0  # drafts that the head makes in this step for the row's next step
    proposals: Tokens[Proposal] = ()
    drafts: Tokens[int] = ()  # what the row feeds in this step
    source: Source = "head"  # of `drafts`
    num_forced: int = 0  # the first so many of `drafts` are all that the grammar allows
    masks: np.ndarray | None = None  # [1 + drafts, words] the tokens that the grammar allows at each position

    def __post_init__(self) -> None:
        if self.feeds_head:
            self.stores_head_inputs = False
        if self.grammar is not None:
            self.masks = self.grammar.masks(())

    @property
    def feeds_head(self) -> bool:
        return self.head_depth > 0

    @property
    def may_pause_head(self) -> bool:
        return self.feeds_head and self.is_auto and self.can_pause_head

    def exceeds_head_context(self, num_cells: int) -> bool:
        """Whether the draft model cannot read so many cells, and draft after them."""
        return self.head_context is not None and num_cells + 1 + MAX_DEPTH > self.head_context

    def propose(
        self,
        tokens: Tokens[int],
        from_head: Tokens[int],
        margins: Tokens[float],
        num_left: int,
        asks_host_drafters: bool = True,
    ) -> None:
        """Collect what the row could feed next. `margins`: of the head's drafts, or none.

        `num_left` tokens may still be committed. Without `asks_host_drafters` only the head's drafts are
        collected, and the tokens that a grammar forces.
        """
        most = min(self.max_depth, num_left - 1)  # the last token of an answer is always a bonus
        found: list[Proposal] = []
        if most > 0:
            drafters = [d for d in (self.drafter, self.lookup) if d and asks_host_drafters]
            asked = (drafter.propose(tokens, most) for drafter in drafters)
            found = [proposal.first(most) for proposal in asked if proposal is not None]
            if from_head:
                found.append(Proposal("head", from_head[:most], confidence=margins[:most]))
        if self.grammar is not None:
            found = self._allowed_by(self.grammar, found, most)
            self.masks = self.grammar.masks(())
        self.proposals, self.drafts = found, ()

    def _allowed_by(self, grammar: TokenGrammar, found: list[Proposal], most: int) -> list[Proposal]:
        """The allowed part of each proposal, and the tokens that the grammar forces as one more proposal."""
        forced = grammar.forced(most) if most > 0 else []
        allowed = [Proposal("forced", forced, len(forced))] if forced else []
        for proposal in found:
            drafts = list(proposal.token_ids)[: grammar.num_allowed(proposal.token_ids)]
            if len(drafts) > len(forced):  # allowed drafts begin with the forced tokens
                confidence = proposal.confidence[: len(drafts)]
                allowed.append(Proposal(proposal.source, drafts, len(forced), confidence))
        return allowed

    def use(self, which: int, num: int) -> None:
        """Feed the first `num` drafts of one proposal. Grammar masks are computed only for these drafts."""
        self.drafts = ()
        if self.proposals:
            used = self.proposals[which]
            self.drafts, self.source, self.num_forced = used.token_ids[:num], used.source, used.num_sure
        if self.grammar is None or not self.drafts:
            self._drop_draft_masks()
            return
        try:
            self.masks = self.grammar.masks(self.drafts)
        except InvalidRequest:  # without drafts the row still has its mask, and may end at its next commit
            self.drafts = ()
            self._drop_draft_masks()
            return
        if self.masks is not None:  # fewer than the drafts if the grammar fails there
            self.drafts = self.drafts[: len(self.masks) - 1]

    def drop(self) -> None:
        self.drafts = self.proposals = ()
        self._drop_draft_masks()

    def _drop_draft_masks(self) -> None:
        self.masks = None if self.masks is None else self.masks[:1]
