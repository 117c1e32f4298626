"""Caches the embeddings of images by content, so that a later turn about an image does not encode it again.

Requests with different cache salts have different keys for the same image: they share no entry.

The cache has a limit in bytes and evicts the least recently used entries. An entry that a row still has to
read is held and not evicted, even beyond the limit: the row could not continue without it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx


class EmbeddingCache:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, mx.array] = OrderedDict()  # least recently used first
        self._held: Counter[str] = Counter()
        self.num_bytes = 0
        self.num_hits = 0

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> mx.array:
        self._entries.move_to_end(key)
        return self._entries[key]

    def put(self, key: str, embeddings: mx.array) -> None:
        """embeddings [tokens, (1 + levels) x hidden], evaluated"""
        if key not in self._entries:
            self._entries[key] = embeddings
            self.num_bytes += embeddings.nbytes
            self._evict()

    def hold(self, keys: Iterable[str]) -> None:
        """A row needs these entries until `release`. Entries that are cached already count as hits."""
        needed = tuple(keys)
        self._held.update(needed)
        self.num_hits += sum(key in self._entries for key in needed)

    def release(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._held[key] -= 1
            if self._held[key] < 0:
                raise AssertionError(f"image embedding {key} is released more often than it was held")
            if not self._held[key]:
                del self._held[key]
        self._evict()

    def forget_holds(self) -> None:
        """Release every entry: all rows are gone."""
        self._held.clear()
        self._evict()

    @property
    def num_held(self) -> int:
        return len(self._held)

    def _evict(self) -> None:
        for key in list(self._entries):
            if self.num_bytes <= self._max_bytes:
                return
            if key not in self._held:
                self.num_bytes -= self._entries.pop(key).nbytes


@dataclass(frozen=True)
class ImageInputs:
    """The image embeddings of a pass, and the rows and columns of their tokens."""

    rows: mx.array  # [tokens]
    columns: mx.array  # [tokens]
    embeddings: mx.array  # [tokens, (1 + levels) x hidden]

    def moved(self, by: mx.array) -> ImageInputs:
        """The same embeddings, `by` columns further on.  by [rows]"""
        return ImageInputs(self.rows, self.columns + by[self.rows], self.embeddings)

    def put_into(self, embedded: mx.array) -> mx.array:
        """embedded [rows, width, hidden]"""
        embedded[self.rows, self.columns] = self.embeddings[:, : embedded.shape[-1]].astype(embedded.dtype)
        return embedded

    def blank(self, token_ids: mx.array) -> mx.array:
        """The ids with 0 in place of images, for models that look up more than embeddings.  [rows, width]"""
        ids = mx.array(token_ids)
        ids[self.rows, self.columns] = 0
        return ids

    def levels(self, embedded: mx.array) -> list[mx.array]:
        """What is added to the hidden states after each of the first layers.  Each [rows, width, hidden]"""
        hidden_size = embedded.shape[-1]
        found = []
        for first in range(hidden_size, self.embeddings.shape[-1], hidden_size):
            level = mx.zeros_like(embedded)
            level[self.rows, self.columns] = self.embeddings[:, first : first + hidden_size]
            found.append(level)
        return found
