"""The processes that run one model together (tensor parallelism), and what passes between them.

Rank 0 serves, plans and samples. The other ranks follow: they run the same passes over their part of the
weights and cells (step/follower.py). MLX's collective operations carry everything: the sums inside the
model's layers, and the messages of rank 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

FRAME = 1024  # numbers of a message that travel in the first operation; chosen by hand
DIGEST_NUMBERS = 8  # of 32 bits


class RanksDiffer(RuntimeError):
    """The ranks do not run the same version, model or settings."""


class Ranks:
    def __init__(self, group: mx.distributed.Group) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.num_bytes_sent = 0  # messages of rank 0

    def send(self, numbers: Sequence[int] | np.ndarray) -> None:
        """A message of rank 0 to all others, which have to call `receive`."""
        message = np.asarray(numbers, np.int32)
        frame = np.zeros(FRAME, np.int32)
        frame[0] = len(message)
        frame[1 : 1 + len(message)] = message[: FRAME - 1]
        self._sum(frame)
        if len(message) >= FRAME:
            self._sum(message[FRAME - 1 :])
        self.num_bytes_sent += 4 * max(FRAME, 1 + len(message))

    def receive(self) -> np.ndarray:
        """The next message of rank 0."""
        frame = self._sum(np.zeros(FRAME, np.int32))
        num = int(frame[0])
        if num < FRAME:
            return frame[1 : 1 + num]
        return np.concatenate([frame[1:], self._sum(np.zeros(num - FRAME + 1, np.int32))])

    def from_first(self, array: mx.array) -> mx.array:
        """Rank 0's array, on all ranks. The others give one of the same shape and dtype."""
        own = array if self.rank == 0 else mx.zeros_like(array)
        return mx.distributed.all_sum(own, group=self.group)

    def check_same(self, facts: str) -> None:
        """Raise RanksDiffer unless all ranks call this with the same text."""
        digest = np.frombuffer(hashlib.sha256(facts.encode()).digest(), np.int32)
        gathered = mx.distributed.all_gather(mx.array(digest)[None], group=self.group)
        found = [np.array(row).tobytes().hex()[:12] for row in gathered]
        if len(set(found)) > 1:
            by_rank = ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(found))
            raise RanksDiffer(
                f"the ranks do not run the same versions, model and settings ({by_rank}). "
                f"This is rank {self.rank}: {facts}"
            )

    def _sum(self, numbers: np.ndarray) -> np.ndarray:
        return np.array(mx.distributed.all_sum(mx.array(numbers), group=self.group))

    def count(self, flags: Sequence[bool]) -> list[int]:
        """How many ranks have set each flag."""
        found: list[int] = self._sum(np.array(flags, np.int32)).tolist()
        return found

    def digests(self, text: str) -> list[str]:
        """Digests of the texts with which all ranks call this, in the order of the ranks."""
        own = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.int32)
        gathered = mx.distributed.all_gather(mx.array(own)[None], group=self.group)
        return [np.array(row).tobytes().hex() for row in gathered]
