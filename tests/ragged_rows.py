"""Rows of a ragged cache fed by hand: what the runner does with plans, without plans.

rows = RaggedRows(trunk, num_slots=4, capacity=32)
rows.join("a", slot=2)
logits = rows.feed({"a": [5, 6, 7]})["a"]     # [3, vocab]
rows.roll_back("a", 1)                        # 7 was a rejected draft

A pass is committed when something else happens next: until then its rows may be rolled back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from outrider.cache.placement import Placement
from outrider.cache.recurrent import RecurrentState
from outrider.models.trunk import Trunk, TrunkCache

Tokens = Sequence[int]


class RaggedRows:
    def __init__(self, trunk: Trunk, num_slots: int, capacity: int) -> None:
        self.trunk = trunk
        self.cache = TrunkCache(trunk.layout)
        self.slots: dict[str, int] = {}
        self.starts: dict[str, int] = {}
        self.adapters: dict[str, int] = {}  # ids, of rows that have one
        self._starts_before: dict[str, int] = {}  # of the rows in the pass that is not yet committed
        self.resize(num_slots, capacity)

    def commit(self) -> None:
        if self._starts_before:
            kept = [self.starts[row] - before for row, before in self._starts_before.items()]
            self.cache.commit(mx.array(kept))
            self._starts_before = {}

    def resize(self, num_slots: int, capacity: int) -> None:
        self.commit()
        self.num_slots, self.capacity = num_slots, capacity
        for kv in self.cache.buffers():
            kv.resize(num_slots, capacity)

    def scribble(self, seed: int = 0) -> None:
        """Fill every cell and state with large junk."""
        self.commit()
        key = mx.random.key(seed)

        def junk(like: mx.array) -> mx.array:
            if like.dtype == mx.uint32:  # codes of quantised cells
                return mx.random.randint(0, 2**31 - 1, like.shape, mx.uint32, key=key)
            return 1e3 * mx.random.normal(like.shape, like.dtype, key=key)

        for buffers in self.cache.buffers():
            if isinstance(buffers, RecurrentState):
                buffers.parts = [junk(part) for part in buffers.parts]
            else:
                buffers.put([junk(array) for array in buffers.arrays()])

    def join(self, row: str, slot: int, adapter: int = 0) -> None:
        self.commit()
        self.slots[row], self.starts[row] = slot, 0
        self.adapters[row] = adapter

    def exchange(self, source: int, target: int, one_way: bool = False) -> None:
        self.commit()
        for kv in self.cache.buffers():
            kv.exchange(source, target, one_way)
        swap = {source: target, target: source}
        self.slots = {row: swap.get(slot, slot) for row, slot in self.slots.items()}

    def feed(self, fed: Mapping[str, Tokens], commits_all: bool = False) -> dict[str, np.ndarray]:
        """One forward pass over these rows, in this order; each row's logits, padding left out.

        A pass of which all is kept cannot be rolled back.
        """
        self.commit()
        width = max(len(tokens) for tokens in fed.values())
        padded = mx.array([[*tokens, *([0] * (width - len(tokens)))] for tokens in fed.values()])
        starts = [self.starts[row] for row in fed]
        ids = [self.adapters.get(row, 0) for row in fed]
        num_fed = [len(tokens) for tokens in fed.values()]
        place = Placement(
            slots=[self.slots[row] for row in fed],
            starts=mx.array(starts),
            num_fed=mx.array(num_fed),
            width=width,
            end=max(start + num for start, num in zip(starts, num_fed, strict=True)),
            capacity=self.capacity,
            commits_all=commits_all,
            adapters=self.trunk.adapters.of_pass(mx.array(ids) if any(ids) else None),
        )
        logits = self.trunk.logits(self.trunk.hidden(padded, self.cache, place))
        mx.eval(logits, [buffers.arrays() for buffers in self.cache.buffers()])
        self._starts_before = {row: self.starts[row] for row in fed}
        for row, num in zip(fed, num_fed, strict=True):
            self.starts[row] += num
        return {row: np.array(logits[i, :num]) for i, (row, num) in enumerate(zip(fed, num_fed, strict=True))}

    def roll_back(self, row: str, num_rejected: int) -> None:
        self.starts[row] -= num_rejected


def solo_logits(model: nn.Module, tokens: Tokens) -> np.ndarray:
    """The model alone with one row, from scratch, as mlx-lm computes it.  [len(tokens), vocab]"""
    caches = make_prompt_cache(model)
    is_recurrent = any(
        type(part) is ArraysCache for layer in caches for part in getattr(layer, "caches", [layer])
    )
    tokens = mx.array([list(tokens)])
    # A recurrent layer without mlx-lm's cache would compute as the engine's do.
    logits = model(tokens, cache=caches) if is_recurrent else model(tokens)
    return np.array(logits[0].astype(mx.float32))


def error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference, relative to the scale of the logits."""
    return float(np.abs(got - want).max() / np.abs(want).max())
