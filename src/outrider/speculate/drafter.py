"""The interface of drafters that run on the host. (Those on the device: step/device_drafter.py.)"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.speculate.acceptance import Source


class Drafter(Protocol):
    """One drafter per sequence. A wrong draft costs time, never correctness."""

    source: Source  # the acceptance record that counts its drafts

    def propose(self, token_ids: Sequence[int], num: int) -> Sequence[int]:
        """Up to `num` guesses for the tokens after `token_ids`: all committed tokens, more at every call."""
        ...
