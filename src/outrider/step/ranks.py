"""The processes that run one model together (tensor parallelism), and what passes between them.

Rank 0 serves, plans and samples. The other ranks follow: they run the same passes over their part of the
weights and cells (step/follower.py). MLX's collective operations carry everything: the sums inside the
model's layers, and the messages of rank 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np

from outrider.config import InvalidConfig

FRAME = 1024  # numbers of a message that travel in the first operation; chosen by hand
MAX_FACTS = 16  # that are compared at once
LONGEST_FACT = 60  # characters of a fact that an error message shows; chosen by hand


class RanksDiffer(InvalidConfig):
    """The ranks do not run the same version, model or settings."""


class RanksOutOfStep(BaseException):
    """Rank 0 has left a step half-way: the operations of its next step would meet those of this one.

    No Exception: the engine must not compute the rows again. It ends, and all ranks are started again.
    """


class RankSignals(Protocol):
    """Wakes ranks that wait for a message without a busy core (MLX's operations keep one busy)."""

    def wake(self) -> None:
        """Rank 0: ends one `wait` of each other rank."""

    def wait(self) -> None:
        """Another rank: until rank 0 wakes it."""


class Ranks:
    def __init__(self, group: mx.distributed.Group, signals: RankSignals | None = None) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.signals = signals
        self.num_bytes_sent = 0  # messages of rank 0
        self._is_resting = False

    def send(self, numbers: Sequence[int] | np.ndarray, waits: bool = True) -> None:
        """A message of rank 0 to all others, which have to call `receive`.

        `waits` False: it travels while this rank goes on. The process must not end meanwhile.
        """
        if self._is_resting and self.signals is not None:
            self.signals.wake()
            self._is_resting = False
        message = np.asarray(numbers, np.int32)
        frame = np.zeros(FRAME, np.int32)
        frame[0] = len(message)
        frame[1 : 1 + len(message)] = message[: FRAME - 1]
        parts = [frame, message[FRAME - 1 :]] if len(message) >= FRAME else [frame]
        for part in parts:
            launched = self._first(part)
            mx.async_eval(launched)
        if waits:
            mx.eval(launched)
        self.num_bytes_sent += sum(part.nbytes for part in parts)

    def receive(self) -> np.ndarray:
        """The next message of rank 0."""
        frame = np.array(self._first(np.zeros(FRAME, np.int32)))
        num = int(frame[0])
        if num < FRAME:
            return frame[1 : 1 + num]
        return np.concatenate([frame[1:], np.array(self._first(np.zeros(num - FRAME + 1, np.int32)))])

    def _first(self, numbers: np.ndarray) -> mx.array:
        """Rank 0's numbers, on all ranks: gathered, which takes half as many exchanges as a sum.

        All on the CPU: a GPU would take longer to add and remove an axis than the message takes.
        """
        with mx.stream(mx.cpu):
            return mx.distributed.all_gather(mx.array(numbers)[None], group=self.group)[0]

    def from_first(self, array: mx.array) -> mx.array:
        """Rank 0's array, on all ranks. The others give one of the same shape and dtype."""
        own = array if self.rank == 0 else mx.zeros_like(array)
        return mx.distributed.all_sum(own, group=self.group)

    def launched_from_first(self, array: mx.array) -> mx.array:
        """The same for a small array, as the next operation of all ranks. Whole numbers are sent as int32."""
        own = array if mx.issubdtype(array.dtype, mx.floating) else array.astype(mx.int32)
        found = mx.distributed.all_gather(own[None], group=self.group)[0]  # see `_first`
        mx.async_eval(found)
        return found

    def rest(self) -> None:
        """The next message may be long in coming. All ranks call this after the same message."""
        if self.signals is None:
            return
        if self.rank == 0:
            self._is_resting = True
        else:
            self.signals.wait()

    def check_same(self, facts: Mapping[str, str]) -> None:
        """Raise RanksDiffer unless all ranks call this with the same facts: texts by name."""
        digests = np.zeros((1, MAX_FACTS, 8), np.int32)
        for i, (name, text) in enumerate(facts.items()):
            digests[0, i] = np.frombuffer(hashlib.sha256(f"{name}={text}".encode()).digest(), np.int32)
        gathered = np.array(mx.distributed.all_gather(mx.array(digests), group=self.group))
        differing = []
        for i, (name, text) in enumerate(facts.items()):
            found = [row[i].tobytes().hex()[:12] for row in gathered]
            if len(set(found)) > 1:
                by_rank = ", ".join(f"rank {rank}: {digest}" for rank, digest in enumerate(found))
                own = text if len(text) <= LONGEST_FACT else f"{text[:LONGEST_FACT]}..."
                differing.append(f"{name} ({by_rank}; here, on rank {self.rank}: {own})")
        if differing:
            raise RanksDiffer(
                f"the ranks do not run the same versions, model and settings. They differ in "
                f"{', '.join(differing)}. Use the same ones on all ranks."
            )

    def _sum(self, numbers: np.ndarray) -> np.ndarray:
        return np.array(mx.distributed.all_sum(mx.array(numbers), group=self.group))

    def count(self, flags: Sequence[bool]) -> list[int]:
        """How many ranks have set each flag."""
        found: list[int] = self._sum(np.array(flags, np.int32)).tolist()
        return found

    def smallest(self, number: int) -> int:
        """The smallest of the numbers with which all ranks call this; at least 0, up to 2 ** 62."""
        own = np.array([[number >> 31, number & (1 << 31) - 1]], np.int32)
        gathered = np.array(mx.distributed.all_gather(mx.array(own), group=self.group)).astype(np.int64)
        return int((gathered[:, 0] << 31 | gathered[:, 1]).min())

    def digests(self, text: str) -> list[str]:
        """Digests of the texts with which all ranks call this, in the order of the ranks."""
        own = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.int32)
        gathered = mx.distributed.all_gather(mx.array(own)[None], group=self.group)
        return [np.array(row).tobytes().hex() for row in gathered]
