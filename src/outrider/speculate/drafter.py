"""What proposes drafts from the host side: anything with a `propose`. (The MTP head drafts on the device.)"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.speculate.acceptance import Source


class Drafter(Protocol):
    """One per sequence. Wrong drafts cost time, never correctness."""

    source: Source  # under which its drafts' fate is recorded

    def propose(self, token_ids: Sequence[int], num: int) -> Sequence[int]:
        """Up to `num` guesses for what follows the committed `token_ids`, which only ever grow."""
        ...
