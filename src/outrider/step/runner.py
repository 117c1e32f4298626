"""The runner: turns a StepPlan into a StepResult. The only code that runs the model.

For each batch of a plan, all on the device and read back once:

    trunk   [rows, width] tokens -> hidden states
    targets for each picking row, at its last committed token and at each draft: edits, then pick
    accept  drafts while they equal the targets; kept = committed + accepted; recurrent layers commit that
    head    feed the pairs (hidden, next token), recurse for the next drafts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from outrider.cache.embeddings import EmbeddingCache
from outrider.cache.prefix_store import PrefixStore
from outrider.cache.ragged_kv import Placement
from outrider.config import CacheGeometry
from outrider.host_array import HostArray
from outrider.models.heads import LoadedHead
from outrider.models.trunk import Buffers, Trunk, TrunkCache
from outrider.models.vision_tower import VisionTower
from outrider.plan import PrefixCopies, RowResult, SaveCells, StepPlan, StepResult, TokenLogprobs
from outrider.prompt_media import MediaPiece
from outrider.sampling.logprobs import read_logprobs
from outrider.speculate.mtp import HeadRows, MTPDrafter
from outrider.step.pictures import deltas_of, positions_of, seen_in
from outrider.step.resting import RestingStates
from outrider.step.verify import Batch, Picks, kept_tokens, next_tokens, verify

WriteBlock = Callable[[str, Mapping[str, HostArray]], object]


class UnsoundLogits(RuntimeError):
    """The model gave NaN or infinity for a token that was to be committed."""


@dataclass(frozen=True)
class _Launched:
    """A batch under way: arrays that the device will fill."""

    batch: Batch
    picks: Picks | None
    heading: list[int]  # rows that the head follows, indices into batch
    drafts: mx.array | None  # [heading, depth]

    def arrays(self) -> Iterator[mx.array]:
        if self.picks is not None:
            yield from self.picks.arrays()
        if self.drafts is not None:
            yield self.drafts


class Runner:
    """Owns the caches of one model and runs steps on them."""

    def __init__(
        self,
        trunk: Trunk,
        head: LoadedHead | None = None,
        write_block: WriteBlock | None = None,
        tower: VisionTower | None = None,
        picture_cache_bytes: int = 0,
    ) -> None:
        """`write_block` takes cached blocks that are to be kept on disk."""
        self._trunk = trunk
        self._tower = tower
        self.shelf = None if tower is None else EmbeddingCache(picture_cache_bytes)
        self._drafter = MTPDrafter(head, trunk) if head is not None else None
        self._resting = RestingStates(trunk) if head is not None else None
        self._cache = TrunkCache(trunk.layout)
        self._prefixes = PrefixStore(self._buffers())
        self._write_block = write_block
        self._shape = (0, 0)  # slots, capacity

    @property
    def has_head(self) -> bool:
        return self._drafter is not None

    @property
    def num_bytes(self) -> int:
        """Bytes that the caches hold now."""
        return sum(buffers.num_bytes for buffers in self._buffers())

    @property
    def prefix_bytes(self) -> int:
        """Bytes of cached prefixes."""
        return self._prefixes.num_bytes

    def geometry(self, page_size: int) -> CacheGeometry:
        per_cell = sum(buffers.spec.bytes_per_cell for buffers in self._buffers())
        per_slot = sum(buffers.spec.bytes_per_slot for buffers in self._buffers())
        return CacheGeometry(per_cell, per_slot, page_size)

    def run(self, plan: StepPlan) -> StepResult:
        self._arrange(plan)
        widths = plan.widths or (1,) * len(plan.batches)
        launched = [self._launch(*each) for each in zip(plan.batches, widths, strict=True)]
        mx.eval([x for one in launched for x in one.arrays()], self._cache_arrays())
        return StepResult(tuple(row for one in launched for row in _collect(one)))

    def encode(self, piece: MediaPiece) -> None:
        """Put a piece's embeddings on the shelf. A unit of work of its own, between steps."""
        assert self._tower is not None and self.shelf is not None
        if piece.key not in self.shelf:
            embeddings = self._tower.encode(piece.inputs, piece.num_tokens)
            mx.eval(embeddings)
            self.shelf.put(piece.key, embeddings)

    def reset(self) -> None:
        """Drop all cells, after a step that failed half-way."""
        for buffers in self._buffers():
            buffers.resize(0, 0)
        self._shape = (0, 0)

    def forget_prefixes(self) -> None:
        self._prefixes.clear()

    def _buffers(self) -> Iterator[Buffers]:
        yield from self._cache.buffers()
        if self._drafter is not None:
            yield from self._drafter.buffers()
        if self._resting is not None:
            yield self._resting.kv

    def _cache_arrays(self) -> list[mx.array]:
        return [array for buffers in self._buffers() for array in buffers.arrays()]

    def _arrange(self, plan: StepPlan) -> None:
        self._save(plan.copies)
        for move in plan.moves:
            for buffers in self._buffers():
                buffers.exchange(move.source, move.target, move.one_way)
        self._resize(plan.num_slots, plan.capacity)
        self._load(plan.copies)

    def _save(self, copies: PrefixCopies) -> None:
        store = self._prefixes
        store.drop(copies.drops)
        for run in _runs(copies.saves):
            store.save_blocks(run)
        for state in copies.states:
            store.save_state(state.state_id, state.slot)
        named = [(save.block_id, save.file_name) for save in copies.saves]
        named += [(state.state_id, state.file_name) for state in copies.states]
        store.settle(i for i, _ in named)
        if self._write_block is not None:
            for i, file_name in named:
                if file_name is not None:
                    self._write_block(file_name, store.to_host(i))

    def _load(self, copies: PrefixCopies) -> None:
        for arrival in copies.arrivals:
            self._prefixes.from_host(arrival.id, arrival.arrays)
        for load in copies.loads:
            self._prefixes.load_blocks(load.slot, load.start, load.pieces)
            if load.state_id is not None:
                self._prefixes.load_state(load.state_id, load.slot)

    def _resize(self, num_slots: int, capacity: int) -> None:
        if (num_slots, capacity) != self._shape:
            for buffers in self._buffers():
                buffers.resize(num_slots, capacity)
            self._shape = (num_slots, capacity)

    def _launch(self, batch: Batch, least_width: int) -> _Launched:
        width = max(least_width, *(row.num_fed for row in batch))
        token_ids = mx.array([[*row.token_ids, *([0] * (width - row.num_fed))] for row in batch])
        starts = mx.array([row.start for row in batch])
        num_fed = mx.array([row.num_fed for row in batch])
        end = max(row.start + row.num_fed for row in batch)
        slots = [row.slot for row in batch]
        any_new = any(row.start == 0 for row in batch)
        positions = positions_of(batch, starts, width)
        place = Placement(slots, starts, num_fed, width, end, self._shape[1], any_new, positions)
        seen = seen_in(batch, self.shelf)
        embeddings = None
        if seen is not None:
            embeddings = seen.put_into(self._trunk.embed(token_ids))
            place.added = seen.levels(embeddings)
        hidden = self._trunk.hidden(token_ids, self._cache, place, embeddings)
        picks = verify(self._trunk, hidden, batch)
        num_kept = kept_tokens(batch, picks)
        self._cache.commit(num_kept)
        if self._resting is not None and any(row.rests for row in batch):
            self._resting.keep(hidden, place)
        heading = [i for i, row in enumerate(batch) if row.feeds_head] if self._drafter is not None else []
        drafts = self._draft(batch, heading, hidden, picks, num_kept) if heading else None
        return _Launched(batch, picks, heading, drafts)

    def _draft(
        self, batch: Batch, heading: list[int], hidden: mx.array, picks: Picks | None, num_kept: mx.array
    ) -> mx.array | None:
        """Feed the head what is now committed and let it draft for the next step."""
        assert self._drafter is not None and self._resting is not None
        next_ids = next_tokens(batch, picks, hidden.shape[1])
        rows = [batch[i] for i in heading]
        starts = mx.array([row.start for row in rows])
        if len(heading) < len(batch):
            index = mx.array(heading)
            hidden, next_ids, num_kept = hidden[index], next_ids[index], num_kept[index]
        head_rows = HeadRows(
            slots=[row.slot for row in rows],
            starts=starts,
            num_fed=mx.array([row.num_fed for row in rows]),
            num_kept=num_kept,
            end=max(row.start + row.num_fed for row in rows),
            params=[row.params for row in rows],
            depth=max(row.num_drafts_next for row in rows),
            positions=positions_of(rows, starts, hidden.shape[1]),
            deltas=deltas_of(rows),
            seen=seen_in(rows, self.shelf, ahead=1),
        )
        capacity = self._shape[1]
        fed = self._resting.catch_up(rows, hidden, next_ids, head_rows, capacity)
        return self._drafter.draft(*fed, capacity)


def _runs(saves: Sequence[SaveCells]) -> list[list[SaveCells]]:
    """Saves of neighbouring cells of one slot, together."""
    runs: list[list[SaveCells]] = []
    for save in saves:
        last = runs[-1][-1] if runs else None
        if last is not None and (last.slot, last.end) == (save.slot, save.start):
            runs[-1].append(save)
        else:
            runs.append([save])
    return runs


def _collect(launched: _Launched) -> Iterator[RowResult]:
    """Read a finished batch back into plain Python."""
    batch, picks = launched.batch, launched.picks
    tokens: dict[int, tuple[int, ...]] = {}
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    if picks is not None:
        tokens = _committed(picks)
        rows = [batch[i] for i in picks.rows]
        found = read_logprobs(picks.logprobs, rows, [tokens[i] for i in picks.rows])
        logprobs = {picks.rows[j]: values for j, values in found.items()}
    drafts: dict[int, list[int]] = {}
    if launched.drafts is not None:
        drafts = dict(zip(launched.heading, np.array(launched.drafts).tolist(), strict=True))
    for i, row in enumerate(batch):
        next_drafts = tuple(drafts.get(i, ())[: row.num_drafts_next])
        yield RowResult(row.sequence_id, tokens.get(i, ()), next_drafts, logprobs.get(i, ()))


def _committed(picks: Picks) -> dict[int, tuple[int, ...]]:
    """Each picking row's accepted drafts and bonus."""
    targets, accepted, is_sound = (np.array(x) for x in (picks.targets, picks.num_accepted, picks.is_sound))
    for j in range(len(picks.rows)):
        if not is_sound[j, : accepted[j] + 1].all():
            raise UnsoundLogits("the model gave NaN or infinite logits")
    return {i: tuple(targets[j, : accepted[j] + 1].tolist()) for j, i in enumerate(picks.rows)}
