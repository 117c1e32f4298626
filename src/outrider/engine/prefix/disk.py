"""Loads blocks from disk into the prefix index for rows that prefill. The disk's own thread reads the files.

A row that finds the next blocks of its prompt on disk waits for them while other rows go on. A file that is
missing, damaged or late ends the fetch, and the row computes the rest.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from outrider.cache.block_file import Arrays
from outrider.cache.disk_tier import DiskTier
from outrider.cache.prefix_index import Node, PrefixIndex, chain_digest
from outrider.plan import Arrival

MAX_REQUESTED_FILES = 16  # files that a row requests at once, so that the disk is never idle; chosen by hand
FILE_TIMEOUT_S = 10.0  # seconds that a row waits for one file before it computes instead; chosen by hand


FileKind = Literal["state", "headless"]  # of recurrent layers; a block without the head's part


def file_name(digest: bytes, kind: FileKind | None = None) -> str:
    """Without a kind: of a block with all its parts."""
    return digest.hex() + (f"-{kind}" if kind else "")


@dataclass
class _PendingFile:
    """A file that a row waits for: a block, or the state after the block before it."""

    name: str
    keys: tuple[int, ...] = ()  # the block's keys; empty for a state
    has_head_part: bool = True
    requested_s: float | None = None

    @property
    def is_late(self) -> bool:
        return self.requested_s is not None and time.monotonic() > self.requested_s + FILE_TIMEOUT_S


@dataclass
class PrefixFetch:
    """The files that one row waits for, in the order of its text."""

    node: Node  # the last block that is in memory
    pending: deque[_PendingFile] = field(default_factory=deque)
    received: dict[str, Arrays | None] = field(default_factory=dict)  # None: the file could not be used

    @property
    def is_done(self) -> bool:
        return not self.pending


class DiskLoader:
    """Requests blocks from the disk and inserts those that arrive into the index."""

    def __init__(self, tier: DiskTier, index: PrefixIndex) -> None:
        self.tier = tier
        self._index = index
        self._waiting: dict[str, list[PrefixFetch]] = {}  # by file name
        self._arrivals: list[Arrival] = []

    def start(self, node: Node, keys: Sequence[int], needs_state: bool) -> PrefixFetch:
        """Request the blocks of `keys` behind `node`. `needs_state`: only up to the last state on disk."""
        size = self._index.block_size
        digest = node.digest
        files: list[_PendingFile] = []
        num_with_state = 0  # files up to the last state
        for start in range(0, len(keys) - size + 1, size):
            block_keys = tuple(keys[start : start + size])
            digest = chain_digest(digest, block_keys)
            names = (file_name(digest), file_name(digest, "headless"))
            name = next((name for name in names if self.tier.has(name)), None)
            if name is None:
                break
            files.append(_PendingFile(name, block_keys, has_head_part=name == names[0]))
            if needs_state and self.tier.has(file_name(digest, "state")):
                files.append(_PendingFile(file_name(digest, "state")))
                num_with_state = len(files)
        fetch = PrefixFetch(node, deque(files[:num_with_state] if needs_state else files))
        self._request(fetch)
        return fetch

    def receive(self) -> None:
        """Give the files that the disk has read to the fetches that wait for them."""
        for fetched in self.tier.take_fetched():
            for fetch in self._waiting.pop(fetched.name, ()):
                fetch.received[fetched.name] = fetched.arrays

    def advance(self, fetch: PrefixFetch) -> None:
        """Insert the received blocks into the index and request more. A failure ends the fetch."""
        while fetch.pending and fetch.pending[0].name in fetch.received:
            file = fetch.pending.popleft()
            arrays = fetch.received.pop(file.name)
            if arrays is None or not fetch.node.is_alive or not self._insert(fetch, file, arrays):
                fetch.pending.clear()
        if fetch.pending and fetch.pending[0].is_late:
            fetch.pending.clear()
        self._request(fetch)

    def take_arrivals(self) -> list[Arrival]:
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def _insert(self, fetch: PrefixFetch, file: _PendingFile, arrays: Arrays) -> bool:
        """False if the index has no room for the block."""
        if not file.keys:
            state_id = self._index.add_state(fetch.node)
            if state_id is not None:
                self._arrivals.append(Arrival(state_id, arrays, file.name))
            return True
        node = self._index.child(fetch.node, file.keys)
        if node is None:
            node = self._index.insert(fetch.node, file.keys, None if file.has_head_part else 0)
            if node is None:
                return False
            self._arrivals.append(Arrival(node.block_id, arrays, file.name))
        fetch.node = node
        return True

    def _request(self, fetch: PrefixFetch) -> None:
        for file in list(fetch.pending)[:MAX_REQUESTED_FILES]:
            if file.requested_s is None:
                file.requested_s = time.monotonic()
                if file.name not in self._waiting:
                    self.tier.fetch(file.name)
                self._waiting.setdefault(file.name, []).append(fetch)
