"""A lazy grammar for the fake runner: certain tokens wake it, and a few tokens later it sleeps again.

It allows everything, so the answers do not change. Only the steps do: see Sequence.commit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np


class SleepyGrammar:
    needs_host = True

    def __init__(self, wakes: Collection[int], num_awake: int = 2) -> None:
        self._wakes = wakes
        self._num_awake = num_awake
        self._num_left = 0  # tokens until it sleeps

    @property
    def is_restricting(self) -> bool:
        return self._num_left > 0

    def commit(self, token_id: int) -> None:
        if self._num_left:
            self._num_left -= 1
        elif token_id in self._wakes:
            self._num_left = self._num_awake

    def num_allowed(self, drafts: Sequence[int]) -> int:
        if self._num_left:
            return min(len(drafts), self._num_left)
        return next((i for i, draft in enumerate(drafts) if draft in self._wakes), len(drafts))

    def masks(self, drafts: Sequence[int]) -> np.ndarray | None:
        return np.full((1 + len(drafts), 1), 0xFFFFFFFF, np.uint32) if self._num_left else None

    def forced(self, most: int) -> list[int]:
        return []
