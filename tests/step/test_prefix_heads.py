"""After a hit the head's cells are what they would be without one, for heads of one layer and of several.

A head of no layer stands for a draft model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from outrider.cache.block_folder import BlockFolder
from outrider.cache.disk_tier import DiskTier
from outrider.cache.prefix_index import PrefixIndex
from outrider.config import EngineConfig
from outrider.engine import sequence as engine_sequence
from outrider.engine.draft_state import DraftState
from outrider.engine.prefix.cache import PrefixCache
from outrider.engine.prefix.disk import DiskLoader
from outrider.engine.scheduler import Scheduler
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

    def __init__(
        self, num_layers: int, is_chained: bool, has_cache: bool, folder: Path | None = None
    ) -> None:
        """`folder`: where the cache's blocks outlive the driver."""
        trunk = world("llama").trunk
        spec = HeadSpec(is_chained=is_chained)
        layers = tuple(random_head(trunk, spec) for _ in range(num_layers))
        for number, layer in enumerate(layers):  # no two alike
            layer.fc.weight = layer.fc.weight * (1 + 0.1 * number)
        draft_model = world("llama drafted by llama").drafters["whole"]
        drafter = LoadedHead(layers, "random") if layers else draft_model
        self.tier = None if folder is None else DiskTier(BlockFolder(folder, "abcd", 1 << 28))
        self.runner = Runner(
            trunk,
            drafter,
            None if self.tier is None else self.tier.write,
            block_size=BLOCK if has_cache else None,
        )
        self._num_layers = num_layers
        geometry = self.runner.geometry(16)
        self.cache = None
        if has_cache:
            per_cell = geometry.bytes_per_cell
            index = PrefixIndex(10**9, per_cell, 0, BLOCK)
            disk = None if self.tier is None else DiskLoader(self.tier, index)
            self.cache = PrefixCache(index, per_cell, disk=disk, min_loaded_cells=1)
        config = EngineConfig(max_rows=1, prefill_step_size=16)
        self._scheduler = Scheduler(config, geometry, 10**9, prefix_cache=self.cache)
        self._num = 0

    def cells_after(
        self, prompt: Sequence[int], max_tokens: int, depth: int = 3
    ) -> tuple[list[int], list[np.ndarray]]:
        """Its tokens, and its final cells just before it ends."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0, seed=0, draft_depth=3)
        row = engine_sequence.Sequence(
            id=self._num,
            request=Request(str(self._num), tuple(prompt), params),
            text=_NoText(),
            stop_ids=frozenset(),
            max_tokens=max_tokens,
            drafting=DraftState(depth, depth, self._num_layers, stores_head_inputs=True),
        )
        self._num += 1
        self._scheduler.add(row)
        found: list[np.ndarray] = []
        while not self._scheduler.is_idle:
            step = self._scheduler.plan()
            if step is None:
                self._scheduler.wait_for_disk()
                continue
            run_step(self._scheduler, self.runner, step)
            if row.slot is not None and row.num_generated:
                found = self._final_cells(row)
        if (last := self._scheduler.plan()) is not None:
            run_step(self._scheduler, self.runner, last)
        self.runner.reset()
        return row.tokens, found

    def _final_cells(self, row: engine_sequence.Sequence) -> list[np.ndarray]:
        arrays = [array for kv in self.runner._buffers() for array in kv.arrays()]
        if row.blocks:
            blocks = mx.array(row.blocks)
            arrays = [mx.concatenate(list(array[blocks]), axis=1) for array in arrays]
        else:
            arrays = [array[row.slot] for array in arrays]
        return [np.array(array[:, : row.num_final]) for array in arrays]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("num_layers", "is_chained"), [(0, True), (1, True), (2, True), (3, True), (3, False)]
)
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


@pytest.mark.parametrize("num_layers", [0, 1, 2])
@pytest.mark.parametrize("from_disk", [False, True])
def test_the_head_catches_up_with_what_a_plain_row_has_left(
    num_layers: int, from_disk: bool, tmp_path: Path
) -> None:
    """In memory, or after a restart on disk; a later plain row uses what the drafting row has left."""
    cached = _Driver(num_layers, True, has_cache=True, folder=tmp_path if from_disk else None)
    expected, cells = _Driver(num_layers, True, has_cache=False).cells_after(TEXT, 12)
    tokens, _ = cached.cells_after(TEXT, 12, depth=0)
    assert tokens == expected
    if cached.tier is not None:
        assert cached.tier.flush()
        cached.tier.close()
        assert len(list(tmp_path.glob("*-headless.block.safetensors"))) >= len(TEXT) // BLOCK - 1
        cached = _Driver(num_layers, True, has_cache=True, folder=tmp_path)
    assert cached.cache is not None
    for depth in (3, 0, 3):
        num_hits = cached.cache.num_hit_cells
        tokens, found = cached.cells_after(TEXT, 12, depth)
        assert tokens == expected
        assert cached.cache.num_hit_cells - num_hits >= len(TEXT) - BLOCK
        if depth:  # the last two are what is stored for a head that was not fed
            end = -2 if num_layers else None
            for one, wanted in zip(found[:end], cells[:end], strict=True):
                num = min(one.shape[1], wanted.shape[1])
                assert np.abs(one[:, :num] - wanted[:, :num]).max() < 1e-4
    if cached.tier is not None:
        cached.tier.close()
