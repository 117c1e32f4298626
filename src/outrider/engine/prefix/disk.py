"""Blocks on their way from disk into the prefix index. Pure Python; the reading itself is done elsewhere.

A row that finds the next blocks of its prompt on disk waits for them, a few at a time, while others go on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.cache.block_file import Arrays
from outrider.cache.disk_tier import Fetched
from outrider.cache.prefix_index import Node, PrefixIndex, chain_digest
from outrider.plan import Arrival

MOST_ASKED = 16  # files that are read ahead for one row
GIVE_UP_S = 10.0  # a disk that takes longer is not waited for: the row computes


class Tier(Protocol):
    """What is needed of cache/disk_tier.py."""

    def has(self, name: str) -> bool: ...

    def fetch(self, name: str) -> None: ...

    def take_fetched(self) -> list[Fetched]: ...

    def wait_for_fetched(self, timeout_s: float) -> None: ...


def file_name(digest: bytes, is_state: bool = False) -> str:
    return digest.hex() + ("-state" if is_state else "")


@dataclass
class _Wanted:
    """A file that a row waits for: the block behind those before it, or that block's state."""

    name: str
    keys: tuple[int, ...] = ()  # none: a state
    asked_s: float | None = None


@dataclass
class Fetches:
    """What one row waits for, in order, behind a block that is in memory."""

    node: Node
    wanted: deque[_Wanted] = field(default_factory=deque)
    here: dict[str, Arrays | None] = field(default_factory=dict)

    @property
    def are_under_way(self) -> bool:
        return bool(self.wanted)


class BlockDisk:
    """Asks the disk for blocks and puts those that come into the index."""

    def __init__(self, tier: Tier, index: PrefixIndex) -> None:
        self._tier = tier
        self._index = index
        self._waiting: dict[str, list[Fetches]] = {}
        self._arrivals: list[Arrival] = []

    def has(self, name: str) -> bool:
        return self._tier.has(name)

    def wait(self, timeout_s: float) -> None:
        self._tier.wait_for_fetched(timeout_s)

    def start(self, node: Node, keys: Sequence[int], needs_state: bool) -> Fetches:
        """Ask for the blocks that hold `keys` behind `node`; with `needs_state` up to the last state only."""
        size = self._index.block_size
        digest, wanted, last_state = node.digest, [], 0
        for place in range(0, len(keys) - size + 1, size):
            block_keys = tuple(keys[place : place + size])
            digest = chain_digest(digest, block_keys)
            if not self._tier.has(file_name(digest)):
                break
            wanted.append(_Wanted(file_name(digest), block_keys))
            if needs_state and self._tier.has(file_name(digest, is_state=True)):
                wanted.append(_Wanted(file_name(digest, is_state=True)))
                last_state = len(wanted)
        fetches = Fetches(node, deque(wanted[:last_state] if needs_state else wanted))
        self._ask(fetches)
        return fetches

    def receive(self) -> None:
        """Give what the disk has brought to whom it was for."""
        for fetched in self._tier.take_fetched():
            for fetches in self._waiting.pop(fetched.name, ()):
                fetches.here[fetched.name] = fetched.arrays

    def advance(self, fetches: Fetches) -> None:
        """Put what has come into the index and ask for more. A failure ends it: the row computes the rest."""
        while fetches.wanted and fetches.wanted[0].name in fetches.here:
            wanted = fetches.wanted.popleft()
            arrays = fetches.here.pop(wanted.name)
            if arrays is None or not fetches.node.is_alive or not self._take_in(fetches, wanted, arrays):
                fetches.wanted.clear()
        if fetches.wanted and _is_late(fetches.wanted[0]):
            fetches.wanted.clear()
        self._ask(fetches)

    def take_arrivals(self) -> list[Arrival]:
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def _take_in(self, fetches: Fetches, wanted: _Wanted, arrays: Arrays) -> bool:
        """Whether there was room."""
        if not wanted.keys:
            state_id = self._index.add_state(fetches.node)
            if state_id is not None:
                self._arrivals.append(Arrival(state_id, arrays))
            return True
        node = self._index.child(fetches.node, wanted.keys)
        if node is None:
            node = self._index.insert(fetches.node, wanted.keys)
            if node is None:
                return False
            self._arrivals.append(Arrival(node.block_id, arrays))
        fetches.node = node
        return True

    def _ask(self, fetches: Fetches) -> None:
        for wanted in list(fetches.wanted)[:MOST_ASKED]:
            if wanted.asked_s is None:
                wanted.asked_s = time.monotonic()
                if wanted.name not in self._waiting:
                    self._tier.fetch(wanted.name)
                self._waiting.setdefault(wanted.name, []).append(fetches)


def _is_late(wanted: _Wanted) -> bool:
    return wanted.asked_s is not None and time.monotonic() > wanted.asked_s + GIVE_UP_S
