"""The interface of drafters that run on the host. (Those on the device: step/device_drafter.py.)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.speculate.acceptance import Source


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts that a row could feed in its next step."""

    source: Source  # the acceptance record that counts these drafts
    token_ids: Sequence[int]
    num_sure: int = 0  # the first so many are certain to be accepted: the grammar allows nothing else
    confidence: Sequence[float] = ()  # of each draft (confidence.py); empty: its drafter says nothing

    def first(self, num: int) -> Proposal:
        return Proposal(self.source, self.token_ids[:num], self.num_sure, self.confidence[:num])


class Drafter(Protocol):
    """One drafter per sequence. A wrong draft costs time, never correctness."""

    def propose(self, token_ids: Sequence[int], num: int) -> Proposal | None:
        """Up to `num` guesses for the tokens after `token_ids`: all committed tokens, more at every call."""
        ...
