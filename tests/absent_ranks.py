"""A group of ranks without the others: for tests of what one rank computes alone."""

from __future__ import annotations


class AbsentRanks:
    """Tells which part of a model is this rank's. A collective operation of MLX raises a TypeError."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size
