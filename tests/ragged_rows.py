"""Rows of a ragged cache fed by hand: what the runner does with plans, without plans.

rows = RaggedRows(trunk, num_slots=4, capacity=32)
rows.join("a", slot=2)
logits = rows.feed({"a": [5, 6, 7]})["a"]     # [3, vocab]
rows.roll_back("a", 1)                        # 7 was a rejected draft
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from outrider.cache.ragged_kv import Placement
from outrider.models.trunk import Trunk, TrunkCache

Tokens = Sequence[int]


class RaggedRows:
    def __init__(self, trunk: Trunk, num_slots: int, capacity: int) -> None:
        self.trunk = trunk
        self.cache = TrunkCache(trunk.layout)
        self.slots: dict[str, int] = {}
        self.starts: dict[str, int] = {}
        self.resize(num_slots, capacity)

    def resize(self, num_slots: int, capacity: int) -> None:
        self.num_slots, self.capacity = num_slots, capacity
        for kv in self.cache.buffers():
            kv.resize(num_slots, capacity)

    def scribble(self, seed: int = 0) -> None:
        """Fill every cell with large junk."""
        key = mx.random.key(seed)
        for kv in self.cache.buffers():
            kv.keys = 1e3 * mx.random.normal(kv.keys.shape, kv.keys.dtype, key=key)
            kv.values = 1e3 * mx.random.normal(kv.values.shape, kv.values.dtype, key=key)

    def join(self, row: str, slot: int) -> None:
        self.slots[row], self.starts[row] = slot, 0

    def exchange(self, source: int, target: int, one_way: bool = False) -> None:
        for kv in self.cache.buffers():
            kv.exchange(source, target, one_way)
        swap = {source: target, target: source}
        self.slots = {row: swap.get(slot, slot) for row, slot in self.slots.items()}

    def feed(self, fed: Mapping[str, Tokens]) -> dict[str, np.ndarray]:
        """One forward pass over these rows, in this order; each row's logits, padding left out."""
        width = max(len(tokens) for tokens in fed.values())
        padded = mx.array([[*tokens, *([0] * (width - len(tokens)))] for tokens in fed.values()])
        starts = [self.starts[row] for row in fed]
        num_fed = [len(tokens) for tokens in fed.values()]
        place = Placement(
            slots=[self.slots[row] for row in fed],
            starts=mx.array(starts),
            num_fed=mx.array(num_fed),
            width=width,
            end=max(start + num for start, num in zip(starts, num_fed, strict=True)),
            capacity=self.capacity,
        )
        logits = self.trunk.logits(self.trunk.hidden(padded, self.cache, place))
        mx.eval(logits, [array for kv in self.cache.buffers() for array in (kv.keys, kv.values)])
        for row, num in zip(fed, num_fed, strict=True):
            self.starts[row] += num
        return {row: np.array(logits[i, :num]) for i, (row, num) in enumerate(zip(fed, num_fed, strict=True))}

    def roll_back(self, row: str, num_rejected: int) -> None:
        self.starts[row] -= num_rejected


def solo_logits(model: nn.Module, tokens: Tokens) -> np.ndarray:
    """The model alone with one row, from scratch, without a cache.  [len(tokens), vocab]"""
    return np.array(model(mx.array([list(tokens)]))[0].astype(mx.float32))


def error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference, relative to the scale of the logits."""
    return float(np.abs(got - want).max() / np.abs(want).max())
