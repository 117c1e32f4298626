"""Random lives of a server with a prefix cache: several histories, with restarts and damage in between.

Requests begin like earlier ones (prompt and answer), go on from them, or fork off. Every answer is compared
with that of the same request alone, without any cache.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from outrider.cache.block_folder import BlockFolder
from outrider.cache.disk_tier import DiskTier
from outrider.cache.prefix_index import PrefixIndex
from outrider.engine.prefix.cache import PrefixCache
from outrider.engine.prefix.disk import DiskLoader
from step.histories import Ask, HeadSize, History, Tally, World, play, random_history

LONGEST = 90  # prompt tokens: all texts stay within the tiny models' contexts


@dataclass
class SessionTally:
    played: Tally = field(default_factory=Tally)
    hit_cells: int = 0
    evictions: int = 0
    restarts: int = 0
    disk_reads: int = 0
    refused: int = 0

    def add(self, other: SessionTally) -> None:
        self.played.add(other.played)
        self.hit_cells += other.hit_cells
        self.evictions += other.evictions
        self.restarts += other.restarts
        self.disk_reads += other.disk_reads
        self.refused += other.refused

    def summary(self) -> str:
        return (
            f"{self.played.summary()}; {self.hit_cells} cells from the cache, {self.evictions} evictions, "
            f"{self.restarts} starts, {self.disk_reads} blocks read from disk, {self.refused} refused"
        )


class Session:
    """One head, one folder; the cache is made anew at every restart."""

    def __init__(self, world: World, seed: int, folder: Path, num_histories: int) -> None:
        self._world = world
        self._rng = random.Random(f"session {seed}")
        self._seed = seed
        self._folder = folder
        self._num_histories = num_histories
        self._head: HeadSize = self._rng.choice(("none", "whole", "whole", "reduced"))
        self._block_size = self._rng.choice((4, 8, 16))
        self._runner = world.runners[self._head]
        if seed % 3:  # rows share the blocks of cached prefixes
            self._block_size = self._rng.choice(world.block_sizes)
            self._runner = world.block_runner(self._head, self._block_size)
        self._has_disk = self._rng.random() < 0.7
        self._texts: list[tuple[int, ...]] = []
        self._tier: DiskTier | None = None
        self.tally = SessionTally()

    def run(self) -> SessionTally:
        try:
            self._start()
            for number in range(self._num_histories):
                self._play(number)
                if self._rng.random() < 0.4:
                    self._stop()
                    self._damage()
                    self._start()
                elif self._rng.random() < 0.1:
                    self._cache.clear()
            self._stop()
        finally:
            if self._tier is not None:
                self._tier.close()
            self._runner._write_block = None
            self._runner.clear_prefixes()
        return self.tally

    def _start(self) -> None:
        per_cell = self._runner.geometry(16).bytes_per_cell
        per_state = self._runner.geometry(16).bytes_per_slot
        per_block = self._block_size * per_cell + per_state
        budget = int(per_block * self._rng.choice((1.5, 20, 500, 500)))
        index = PrefixIndex(budget, per_cell, per_state, self._block_size)
        disk = None
        if self._has_disk:
            disk_bytes = self._rng.choice((1 << 19, 1 << 28))
            self._tier = self._new_tier(BlockFolder(self._folder, "abcd", disk_bytes))
            disk = DiskLoader(self._tier, index)
            self._runner._write_block = self._tier.write
        self._cache = PrefixCache(
            index,
            per_cell,
            has_states=per_state > 0,
            disk=disk,
            min_loaded_cells=self._rng.choice((1, 3)),
        )
        self._runner.clear_prefixes()

    def _new_tier(self, folder: BlockFolder) -> DiskTier:
        return DiskTier(folder)

    def _stop(self) -> None:
        self.tally.restarts += 1
        self.tally.hit_cells += self._cache.num_hit_cells
        self.tally.evictions += self._cache.index.num_evicted
        if self._tier is not None:
            self._tier.close()
            self.tally.disk_reads += self._tier.counts.read
            self.tally.refused += self._tier.counts.refused
            assert self._tier.counts.failed == 0

    def _damage(self) -> None:
        """Some of the files are not what they were."""
        files = sorted(self._folder.rglob("*.safetensors"))  # a damaged key is another matter
        for path in self._rng.sample(files, min(len(files), self._rng.choice((0, 3, 8)))):
            whole = bytearray(path.read_bytes())
            if self._rng.random() < 0.5:
                whole[self._rng.randrange(len(whole))] ^= 1 << self._rng.randrange(8)
            else:
                del whole[self._rng.randrange(len(whole)) :]
            path.write_bytes(whole)

    def _play(self, number: int) -> None:
        history = random_history(1000 * self._seed + number, self._world.vocab_size)
        history = self._shared(history)
        self.tally.played.add(play(self._world, history, self._cache, self._runner))
        if self._tier is not None:
            assert self._tier.flush()
        assert self._cache.index.num_bytes <= self._cache.index.budget_bytes
        for ask in history.asks:
            self._texts.append((*ask.prompt, *self._world.answer(ask).token_ids))

    def _shared(self, history: History) -> History:
        """The same requests, most with a beginning that was images before, for this session's head."""
        asks: list[Ask] = []
        for ask in history.asks:
            kind = ask.kind.removesuffix(" with head").replace("head", "plain")
            if self._head != "none" and self._rng.random() < 0.85:
                kind = self._rng.choice(("head", "head", "scripted with head", "prediction with head"))
            salt = self._rng.choice((*[""] * 7, "other"))
            prompt = self._prompt(ask.prompt, [*self._texts, *(other.prompt for other in asks)])
            asks.append(replace(ask, prompt=prompt, kind=kind, params=replace(ask.params, cache_salt=salt)))  # type: ignore[arg-type]
        return replace(history, asks=tuple(asks), head=self._head)

    def _prompt(self, new: tuple[int, ...], images: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        if not images or self._rng.random() < 0.1:
            return (*new, *(self._rng.randrange(self._world.vocab_size) for _ in range(40)))
        earlier = self._rng.choice(images)
        shared = earlier[: self._rng.choice((len(earlier), self._rng.randint(1, len(earlier))))]
        rest = new[: self._rng.choice((0, 1, 3, 30))]
        return (*shared, *rest)[-LONGEST:] if len(shared) < 10 else (*shared, *rest)[:LONGEST]


def play_session(world: World, seed: int, folder: Path, num_histories: int = 4) -> SessionTally:
    return Session(world, seed, folder, num_histories).run()
