"""Drafter invariance with adapters: rows with different adapters, and with none, give what they give alone.

The histories of `step/histories.py`, whose requests name adapters here. With a prefix cache their prompts are
alike: a prefix of one adapter must never be used for another.
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from adapter_files import write_adapter
from outrider.cache.block_folder import BlockFolder
from outrider.cache.disk_tier import DiskTier
from outrider.cache.prefix_index import PrefixIndex
from outrider.engine.prefix import cache as prefix_cache
from outrider.engine.prefix.cache import PrefixCache
from outrider.engine.prefix.disk import DiskLoader
from outrider.models.adapters.files import AdapterFiles, read_adapter
from outrider.models.trunk import Trunk
from outrider.plan import AdapterInfo, RowPlan, StepPlan
from outrider.request import SamplingParams
from outrider.step.batch import InputBatch
from outrider.step.runner import Runner
from patience import in_test_or_soak
from plan_rows import plan_row
from step.histories import Divergence, History, Tally, World, play, random_history
from step.reference import Row, engine_row, mlx_lm_row

NUM_HISTORIES = {  # in `make test`, in `make soak`
    "llama": in_test_or_soak(8, 60),
    "llama-4bit": in_test_or_soak(8, 60),
    "llama kv8": in_test_or_soak(3, 30),
    "llama-4bit kv8": in_test_or_soak(3, 30),
    "llama-4bit kv16": in_test_or_soak(2, 30),
    "llama-4bit kv4": in_test_or_soak(1, 30),
    "qwen3-8bit": in_test_or_soak(3, 30),
    "qwen3_5-4bit": in_test_or_soak(2, 20),
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "one": {"rank": 3, "seed": "one"},
    "two": {"rank": 8, "seed": "two", "kind": "dora"},
}


@pytest.fixture(autouse=True, scope="module")
def not_compiled() -> None:
    """As on CPUs: MLX would start a compiler for each small function of mlx-lm's models."""
    mx.disable_compile()


class AdaptedWorld(World):
    """A world whose trunk has adapters."""

    def __init__(self, name: str, sizes: Mapping[str, Any] = {}) -> None:
        super().__init__(name, sizes)
        self.adapted = {adapter: self.new_model() for adapter in ADAPTERS}
        self.files = written_adapters(self.adapted)
        load_all(self.trunk, self.files)

    def adapter_of(self, params: SamplingParams) -> AdapterInfo | None:
        return None if params.adapter is None else self.trunk.adapters.loaded[params.adapter]

    def row_alone(self, params: SamplingParams) -> Row:
        adapter = self.adapter_of(params)
        if adapter is None:
            return super().row_alone(params)
        if self._rounds:
            return engine_row(self.trunk, adapter.id)
        return mlx_lm_row(self.adapted[adapter.name])


def written_adapters(models: Mapping[str, nn.Module]) -> dict[str, AdapterFiles]:
    """The files of ADAPTERS, each for a model of its own, which then computes with the adapter."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            adapter: read_adapter(write_adapter(Path(folder, adapter), models[adapter], **how))
            for adapter, how in ADAPTERS.items()
        }


def load_all(trunk: Trunk, files: Mapping[str, AdapterFiles]) -> None:
    trunk.adapters.allow(len(files), 1 << 30)
    for adapter, own in files.items():
        trunk.adapters.load(adapter, own)


@functools.cache
def adapted_world(name: str) -> AdaptedWorld:
    return AdaptedWorld(name)


def adapted_history(seed: int, vocab_size: int, shares_prompts: bool = False) -> History:
    """A random history whose requests name adapters, or none. `shares_prompts`: their prompts begin alike."""
    history = random_history(seed, vocab_size)
    rng = random.Random(f"adapters {seed}")
    common = tuple(rng.randrange(vocab_size) for _ in range(20)) if shares_prompts else ()
    asks = tuple(
        replace(
            ask,
            prompt=common + ask.prompt[:12] if shares_prompts else ask.prompt,
            params=replace(ask.params, adapter=rng.choice((None, *ADAPTERS))),
            joins_at=ask.joins_at + (8 * i if shares_prompts else 0),
        )
        for i, ask in enumerate(history.asks)
    )
    return replace(history, asks=asks, inspects=False)


@pytest.mark.soak
@pytest.mark.parametrize("name", NUM_HISTORIES)
def test_rows_with_adapters_give_what_they_give_alone(name: str) -> None:
    world, tally = adapted_world(name), Tally()
    for seed in range(100, 100 + NUM_HISTORIES[name]):
        try:
            tally.add(play(world, adapted_history(seed, world.vocab_size)))
        except Exception as error:
            error.add_note(f"history {seed} of {name}")
            raise
    print(tally.summary())
    assert tally.excused <= world.tolerance.excused * tally.tokens
    assert tally.tokens > 20 * NUM_HISTORIES[name]
    assert sum(tally.accepted[key] for key in tally.accepted if key[2] > 0) > 0


# -- traced passes -------------------------------------------------------------------------------------------


def test_one_trace_serves_rows_of_all_adapters() -> None:
    """Ids and adapters are inputs of a trace: rows change their adapters, and adapters change."""
    world = AdaptedWorld("llama")
    adapters = world.trunk.adapters
    built, traced = Runner(world.trunk), Runner(world.trunk, compiles=True)

    def results(runner: Runner, *ids: int) -> list[tuple[int, ...]]:
        params = SamplingParams(temperature=0)
        reads = [plan_row([3, 1, 4], params=params, slot=i, start=0, next_id=1) for i in range(3)]
        rows = [plan_row([3, 1, 4], [1], [5], params=params, slot=i) for i in range(3)]
        reads, rows = (
            [replace(row, adapter=id) for row, id in zip(part, ids, strict=True)] for part in (reads, rows)
        )
        runner.run(StepPlan(3, 96, (), (tuple(reads),)))
        found = runner.run(StepPlan(3, 96, (), (tuple(rows),))).rows
        runner.reset()
        return [row.token_ids for row in found]

    expected = [results(built, *ids) for ids in ((1, 0, 2), (2, 2, 0))]
    assert [results(traced, *ids) for ids in ((1, 0, 2), (2, 2, 0))] == expected
    assert expected[0] != expected[1]
    adapters.unload("one")
    adapters.load("three", world.files["two"])  # id 1 is another adapter now
    assert results(traced, 1, 0, 2) == results(built, 1, 0, 2)
    assert traced._compiled is not None
    assert traced._compiled.num_traces == 1


# -- prefix caches -------------------------------------------------------------------------------------------


def play_with_cache(world: AdaptedWorld, folder: Path, seeds: range) -> int:
    """Play histories with a prefix cache and files in `folder`. Returns the cells that were not computed."""
    num_cells = 0
    for seed in seeds:
        history = adapted_history(seed, world.vocab_size, shares_prompts=True)
        runner = world.runners[history.head]
        per_cell = runner.geometry(16).bytes_per_cell
        index = PrefixIndex(10**9, per_cell, 0, 4)
        tier = DiskTier(BlockFolder(folder / history.head, "abcd", 1 << 28))
        cache = PrefixCache(index, per_cell, disk=DiskLoader(tier, index), min_loaded_cells=1)
        runner._write_block = tier.write
        try:
            play(world, history, cache, runner)
        finally:
            tier.close()
            runner._write_block = None
            runner.clear_prefixes()
        num_cells += cache.num_hit_cells
    return num_cells


SEEDS = range(7, 7 + in_test_or_soak(3, 40))


@pytest.mark.soak
def test_a_cached_prefix_is_used_by_rows_of_its_adapter_only(tmp_path: Path) -> None:
    """In memory and on disk. An adapter is known by its contents: other ones get the names in the end."""
    world = AdaptedWorld("llama")
    assert play_with_cache(world, tmp_path, SEEDS) > 50
    infos = dict(world.trunk.adapters.loaded)
    for name in ADAPTERS:
        world.trunk.adapters.unload(name)
    for name, other in (("one", "two"), ("two", "one")):
        loaded = world.trunk.adapters.load(name, world.files[other])
        assert loaded.fingerprint == infos[other].fingerprint
    world.adapted = {"one": world.adapted["two"], "two": world.adapted["one"]}
    world._answers.clear()
    assert play_with_cache(world, tmp_path, SEEDS) > 50


# -- controls: what the tests above must notice --------------------------------------------------------------


def play_all(world: AdaptedWorld, seeds: range) -> None:
    for seed in seeds:
        play(world, adapted_history(seed, world.vocab_size))


def without_adapters(patch: pytest.MonkeyPatch) -> None:
    from_plan = InputBatch.from_plan

    def forgetful(batch: Sequence[RowPlan], width: int, num_columns: int = 0) -> InputBatch:
        return replace(from_plan(batch, width, num_columns), adapters=None)

    patch.setattr(InputBatch, "from_plan", forgetful)


def of_the_row_before(patch: pytest.MonkeyPatch) -> None:
    from_plan = InputBatch.from_plan

    def shifted(batch: Sequence[RowPlan], width: int, num_columns: int = 0) -> InputBatch:
        inputs = from_plan(batch, width, num_columns)
        found = None if inputs.adapters is None else mx.roll(inputs.adapters, 1)
        return replace(inputs, adapters=found)

    patch.setattr(InputBatch, "from_plan", shifted)


@pytest.mark.parametrize("fault", [without_adapters, of_the_row_before])
@pytest.mark.parametrize("name", ["llama", "llama-4bit"])
def test_rows_with_wrong_adapters_are_noticed(
    name: str, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    world = adapted_world(name)
    with pytest.raises(Divergence):
        play_all(world, range(100, 110))


def test_a_prefix_cache_that_does_not_know_adapters_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_cache, "_tree_name", lambda row: "one tree")
    with pytest.raises(Divergence):
        play_with_cache(adapted_world("llama"), tmp_path, range(7, 17))
