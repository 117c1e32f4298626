"""After a hit the head's cells are what they would be without one, for heads of one layer and of several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from outrider.cache.prefix_index import PrefixIndex
from outrider.config import EngineConfig
from outrider.engine import sequence as engine_sequence
from outrider.engine.prefix.cache import PrefixCache
from outrider.engine.scheduler import Scheduler
from outrider.engine.sequence import DraftState
from outrider.models.heads import HeadSpec, LoadedHead
from outrider.request import Request, SamplingParams
from outrider.step.runner import Runner
from patience import in_test_or_soak
from run_steps import run_step
from step.histories import _NoText, random_head, world

BLOCK = 8
TEXT = [(3 + 7 * i + i * i) % 60 for i in range(60)]


class _Driver:
    """A scheduler and a runner, a request at a time."""

    def __init__(self, num_layers: int, is_chained: bool, has_cache: bool) -> None:
        trunk = world("llama").trunk
        spec = HeadSpec(is_chained=is_chained)
        layers = tuple(random_head(trunk, spec) for _ in range(num_layers))
        for number, layer in enumerate(layers):  # no two alike
            layer.fc.weight = layer.fc.weight * (1 + 0.1 * number)
        self.runner = Runner(trunk, LoadedHead(layers, "random"))
        self._num_layers = num_layers
        geometry = self.runner.geometry(16)
        self.cache = None
        if has_cache:
            per_cell = geometry.bytes_per_cell
            self.cache = PrefixCache(PrefixIndex(10**9, per_cell, 0, BLOCK), per_cell, min_loaded_cells=1)
        config = EngineConfig(max_rows=1, prefill_step_size=16)
        self._scheduler = Scheduler(config, geometry, 10**9, prefix_cache=self.cache)
        self._num = 0

    def cells_after(self, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], list[np.ndarray]]:
        """Its tokens, and its final cells just before it ends."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0, seed=0, draft_depth=3)
        row = engine_sequence.Sequence(
            id=self._num,
            request=Request(str(self._num), tuple(prompt), params),
            text=_NoText(),
            stop_ids=frozenset(),
            max_tokens=max_tokens,
            drafting=DraftState(3, 3, self._num_layers),
        )
        self._num += 1
        self._scheduler.add(row)
        found: list[np.ndarray] = []
        while not self._scheduler.is_idle:
            step = self._scheduler.plan()
            assert step is not None
            run_step(self._scheduler, self.runner, step)
            if row.slot is not None and row.num_generated:
                buffers = self.runner._buffers()
                cells = [array[row.slot, :, : row.num_final] for kv in buffers for array in kv.arrays()]
                found = [np.array(array) for array in cells]
        if (last := self._scheduler.plan()) is not None:
            run_step(self._scheduler, self.runner, last)
        self.runner.reset()
        return row.tokens, found


@pytest.mark.soak
@pytest.mark.parametrize(("num_layers", "is_chained"), [(1, True), (2, True), (3, True), (3, False)])
def test_the_heads_cells_are_right_after_any_fork(num_layers: int, is_chained: bool) -> None:
    cached = _Driver(num_layers, is_chained, has_cache=True)
    plain = _Driver(num_layers, is_chained, has_cache=False)
    assert cached.cache is not None
    first, _ = cached.cells_after(TEXT, 12)
    for place in (*range(20, 36), len(TEXT) + 5):
        for other in range(1, 1 + in_test_or_soak(1, 2)):
            fork = [*first[:place], (first[place] + other) % 60, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
            num_hits = cached.cache.num_hit_cells
            tokens, found = cached.cells_after(fork, 8)
            expected_tokens, expected = plain.cells_after(fork, 8)
            assert tokens == expected_tokens
            assert cached.cache.num_hit_cells - num_hits >= place - num_layers
            for one, wanted in zip(found, expected, strict=True):
                cells = min(one.shape[1], wanted.shape[1])
                assert cells > place
                assert np.abs(one[:, :cells] - wanted[:, :cells]).max() < 1e-4, f"fork at {place}"
