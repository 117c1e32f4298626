"""The runner: turns a StepPlan into a StepResult. The only code that runs the model.

A step is launched (its batches' passes are handed to the device) and finished (read, once). Between the two
another one may be launched that follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from outrider.cache.embedding_cache import EmbeddingCache
from outrider.cache.prefix_store import PrefixStore
from outrider.config import CacheGeometry
from outrider.host_array import HostArray
from outrider.models.heads import LoadedHead
from outrider.models.trunk import Buffers, Trunk
from outrider.models.vision.encoder import VisionTower
from outrider.plan import PassShape, PrefixCopies, SaveCells, StepPlan, StepResult
from outrider.prompt_media import MediaPiece
from outrider.step.compiled import CompiledPasses, padding_rows, repeats
from outrider.step.forward import Forward
from outrider.step.input_batch import Batch, InputBatch, NextInputs
from outrider.step.pass_output import PassOutput

WriteBlock = Callable[[str, Mapping[str, HostArray]], object]


@dataclass(frozen=True)
class Launched:
    """A step under way."""

    outputs: tuple[PassOutput, ...]
    is_whole: bool = True  # no pass was for fewer rows than planned, as one that cannot be traced is

    @property
    def is_traced(self) -> bool:
        """Whether a pass of it was traced for the first time, which takes the host far longer than a step."""
        return any(output.is_traced for output in self.outputs)


class Runner:
    """Owns the caches of one model and runs steps on them."""

    def __init__(
        self,
        trunk: Trunk,
        head: LoadedHead | None = None,
        write_block: WriteBlock | None = None,
        tower: VisionTower | None = None,
        picture_cache_bytes: int = 0,
        compiles: bool = False,
    ) -> None:
        """`write_block` takes cached blocks that are to be kept on disk.

        `compiles`: trace decode passes once a shape and replay them; worth while where the device is so fast
        that building a pass takes the host longer than running it takes the device.
        """
        self._tower = tower
        self.image_embeddings = None if tower is None else EmbeddingCache(picture_cache_bytes)
        self._forward = Forward(trunk, head, self.image_embeddings)
        self._compiled = CompiledPasses(self._forward) if compiles else None
        self._prefixes = PrefixStore(self._buffers())
        self._write_block = write_block
        self._shape = (0, 0)  # slots, capacity

    @property
    def has_head(self) -> bool:
        return self._forward.has_head

    @property
    def compiles(self) -> bool:
        return self._compiled is not None

    @property
    def num_bytes(self) -> int:
        """Bytes that the caches hold now."""
        return sum(buffers.num_bytes for buffers in self._buffers())

    @property
    def prefix_bytes(self) -> int:
        """Bytes of cached prefixes."""
        return self._prefixes.num_bytes

    def geometry(self, capacity_step: int) -> CacheGeometry:
        per_cell = sum(buffers.spec.bytes_per_cell for buffers in self._buffers())
        per_slot = sum(buffers.spec.bytes_per_slot for buffers in self._buffers())
        return CacheGeometry(per_cell, per_slot, capacity_step)

    def run(self, plan: StepPlan) -> StepResult:
        return self.finish(self.launch(plan))

    def launch(self, plan: StepPlan, after: Launched | None = None) -> Launched:
        """Set the device to work on a step; on one that follows, `after` the step that it follows."""
        if plan.is_overlapped != (after is not None):
            raise ValueError("a step that follows another needs to be told which")
        self._arrange(plan)
        shapes = plan.shapes or (PassShape(),) * len(plan.batches)
        before = None if after is None else after.outputs[0].next_inputs
        outputs = [self._launch(*each, before) for each in zip(plan.batches, shapes, strict=True)]
        mx.async_eval([x for output in outputs for x in output.arrays()], self._cache_arrays())
        is_whole = all(f.num_rows >= shape.rows for f, shape in zip(outputs, shapes, strict=True))
        return Launched(tuple(outputs), is_whole)

    def finish(self, launched: Launched) -> StepResult:
        """Wait for a step and read it."""
        return StepResult(tuple(row for output in launched.outputs for row in output.read()))

    def encode(self, piece: MediaPiece) -> None:
        """Put a piece's embeddings on the image_embeddings. A unit of work of its own, between steps."""
        assert self._tower is not None and self.image_embeddings is not None
        if piece.key not in self.image_embeddings:
            embeddings = self._tower.encode(piece.inputs, piece.num_tokens)
            mx.eval(embeddings)
            self.image_embeddings.put(piece.key, embeddings)

    def reset(self) -> None:
        """Drop all cells, after a step that failed half-way."""
        for buffers in self._buffers():
            buffers.resize(0, 0)
        self._shape = (0, 0)

    def forget_prefixes(self) -> None:
        self._prefixes.clear()

    def _buffers(self) -> Iterator[Buffers]:
        return self._forward.buffers()

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

    def _launch(self, batch: Batch, least: PassShape, before: NextInputs | None) -> PassOutput:
        width = max(least.width, *(row.num_fed for row in batch))
        compiled = self._compiled if self._compiled is not None and repeats(batch) else None
        padding = () if compiled is None else padding_rows(batch, least.rows)
        rows = [*batch, *padding]
        inputs = InputBatch.of_rows(rows, width) if before is None else InputBatch.after(before, rows, width)
        if compiled is None:
            return self._forward(batch, inputs, self._shape[1])
        return compiled(batch, padding, inputs, self._shape)


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
