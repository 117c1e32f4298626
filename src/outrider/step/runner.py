"""The runner: turns a StepPlan into a StepResult. The only code that serves with the model.

`launch` hands a step's passes to the device, `finish` waits for them and reads one small array for each pass.
Between the two calls the next step may be launched, if its plan is an overlapped one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from outrider.cache.embedding_cache import EmbeddingCache
from outrider.cache.prefix_store import PrefixStore
from outrider.cache.ragged_kv import RaggedKV
from outrider.cache.recurrent import RecurrentState
from outrider.cpu.cells import native_copy_cells
from outrider.host_array import HostArray
from outrider.models.prompt_scorer import PromptScorer
from outrider.models.trunk import Buffers, Trunk
from outrider.models.vision.encoder import VisionEncoder
from outrider.plan import (
    Arrival,
    CacheGeometry,
    PassShape,
    PrefixCopies,
    RestoreState,
    SaveCells,
    ScoringPiece,
    StepPlan,
    StepResult,
)
from outrider.prompt_media import MediaPiece
from outrider.step import step_message
from outrider.step.batch import Batch, InputBatch, InvalidLogits, NextInputs, PassOutput
from outrider.step.compiled import CompiledPasses, is_traceable, num_table_columns, padding_rows
from outrider.step.device_drafter import LoadedDrafter
from outrider.step.forward import Forward
from outrider.step.ranks import Ranks, RanksOutOfStep

WriteBlock = Callable[[str, Mapping[str, HostArray]], object]
ReadBlock = Callable[[str], Mapping[str, HostArray]]


@dataclass(frozen=True)
class LaunchedPasses:
    """A step that the device works on: the output of each pass, before the host has read it."""

    outputs: tuple[PassOutput, ...]
    is_as_planned: bool = True  # False: a pass could not be traced, so it has no padding rows

    @property
    def is_first_trace(self) -> bool:
        """Whether one of the passes was traced just now, which takes the host far longer than a step."""
        return any(output.is_first_trace for output in self.outputs)


class Runner:
    """Runs steps of one model. `Forward` owns the row caches, `PrefixStore` the cached blocks."""

    def __init__(
        self,
        trunk: Trunk,
        drafter: LoadedDrafter | None = None,
        write_block: WriteBlock | None = None,
        vision_encoder: VisionEncoder | None = None,
        image_cache_bytes: int = 0,
        compiles: bool = False,
        block_size: int | None = None,
        ranks: Ranks | None = None,
        scorer: PromptScorer | None = None,
        read_block: ReadBlock | None = None,
    ) -> None:
        """`write_block` writes cached blocks to disk. `block_size`: rows keep their cells by blocks of so
        many cells; None: by slots.

        `compiles`: trace decode passes once for each shape and replay them. This pays where the device is so
        fast that the host takes longer to build a pass than the device takes to run it.

        `ranks`: the model runs on several ranks. Rank 0 sends them every step (step/follower.py).
        `read_block`: on a rank other than 0, reads a block from its disk.

        `scorer`: for requests that skip tokens of their prompts.
        """
        self._scorer = scorer
        if ranks is not None and compiles:
            raise ValueError("steps of several ranks are not traced")
        self._ranks = ranks
        self._vision_encoder = vision_encoder
        self.image_embeddings = None if vision_encoder is None else EmbeddingCache(image_cache_bytes)
        self._forward = Forward(trunk, drafter, self.image_embeddings, block_size, ranks)
        self._compiled = CompiledPasses(self._forward) if compiles else None
        self._prefixes = PrefixStore(self._buffers(), block_size, native_copy_cells())
        self._write_block = write_block
        self._read_block = read_block
        self._block_size = block_size
        self._num_slots = self._capacity = self._num_blocks = 0
        self._versions: deque[list[list[mx.array]]] = deque(maxlen=2)  # states before the overlapped steps

    @property
    def has_head(self) -> bool:
        return self._forward.has_head

    @property
    def has_followers(self) -> bool:
        """Whether other ranks run every step too."""
        return self._ranks is not None and self._ranks.rank == 0

    @property
    def compiles(self) -> bool:
        return self._compiled is not None

    @property
    def num_bytes(self) -> int:
        """Bytes that the row caches hold now."""
        return sum(buffers.num_bytes for buffers in self._buffers())

    @property
    def prefix_bytes(self) -> int:
        """Bytes of cached prefixes."""
        return self._prefixes.num_bytes

    def geometry(self, capacity_step: int) -> CacheGeometry:
        per_cell = sum(buffers.spec.bytes_per_cell for buffers in self._buffers())
        per_slot = sum(buffers.spec.bytes_per_slot for buffers in self._buffers())
        return CacheGeometry(per_cell, per_slot, capacity_step, self._block_size)

    def run(self, plan: StepPlan) -> StepResult:
        return self.finish(self.launch(plan))

    def launch(self, plan: StepPlan, previous: LaunchedPasses | None = None) -> LaunchedPasses:
        """Hand a step to the device. An overlapped step takes its inputs from `previous`."""
        if plan.is_overlapped != (previous is not None):
            raise ValueError("an overlapped plan needs the step before it, and no other plan does")
        shapes = plan.shapes or (PassShape(),) * len(plan.batches)
        if self._ranks is not None:
            widths = [_width(*each) for each in zip(plan.batches, shapes, strict=True)]
            message = step_message.encode(plan, widths, self._forward.has_divided_head)
            self._ranks.send(message, waits=False)
        next_inputs = None if previous is None else previous.outputs[0].next_inputs
        with self._step_of_all_ranks():
            self._arrange(plan)
            if plan.keeps_states:
                self._versions.append([state.version() for state in self._states()])
            outputs = [
                self._launch_pass(batch, shape, next_inputs)
                for batch, shape in zip(plan.batches, shapes, strict=True)
            ]
            mx.async_eval([array for output in outputs for array in output.arrays()], self._cache_arrays())
        is_as_planned = all(
            output.num_rows >= shape.rows for output, shape in zip(outputs, shapes, strict=True)
        )
        return LaunchedPasses(tuple(outputs), is_as_planned)

    def _launch_pass(self, batch: Batch, shape: PassShape, next_inputs: NextInputs | None) -> PassOutput:
        width = _width(batch, shape)
        compiled = self._compiled if self._compiled is not None and is_traceable(batch) else None
        padding = () if compiled is None else padding_rows(batch, shape.rows)
        rows = [*batch, *padding]
        # For CUDA: each new shape costs MLX a plan of cuDNN.
        has_few_shapes = self._compiled is not None and mx.cuda.is_available()
        is_rounded = compiled is not None or has_few_shapes
        num_columns = num_table_columns(batch, self._block_size) if is_rounded else 0
        if next_inputs is None:
            inputs = InputBatch.from_plan(rows, width, num_columns)
        else:
            inputs = InputBatch.after(next_inputs, rows, width, num_columns)
        if compiled is None:
            return self._forward(batch, inputs, self._capacity, has_few_shapes)
        return compiled(batch, padding, inputs, self._num_slots, self._capacity)

    def follow(self, step: step_message.FollowedStep) -> None:
        """Run a step of rank 0 on another rank."""
        plan = step.plan
        self._arrange(plan)
        for batch, shape, media in zip(plan.batches, plan.shapes, step.media, strict=True):
            inputs = InputBatch.from_plan(batch, _width(batch, shape))
            self._forward.follow(batch, inputs, self._capacity, media)
        mx.async_eval(self._cache_arrays())

    def stop_followers(self, has_failed: bool) -> None:
        """`has_failed`: ranks that watch rank 0 end when it ends, and start again with it."""
        if not has_failed or self._ranks is None or self._ranks.signals is None:
            self._tell(step_message.STOP)

    def _tell(self, what: int) -> None:
        if self._ranks is not None and self._ranks.rank == 0:
            self._ranks.send([what])
            if what == step_message.RESET:
                self._ranks.rest()

    def finish(self, launched: LaunchedPasses) -> StepResult:
        """Wait for a step and read it."""
        with self._step_of_all_ranks():
            return StepResult(tuple(row for output in launched.outputs for row in output.read()))

    @contextmanager
    def _step_of_all_ranks(self) -> Iterator[None]:
        """The other ranks compute this too. If rank 0 does not finish it, all ranks have to start again."""
        try:
            yield
        except InvalidLogits:  # computed to the end
            raise
        except Exception as error:
            if self._ranks is None:
                raise
            raise RanksOutOfStep(f"a step failed on rank 0 only: {error}") from error

    def encode(self, piece: MediaPiece) -> None:
        """Compute the embeddings of one piece of an image: a unit of work of its own, between steps."""
        assert self._vision_encoder is not None and self.image_embeddings is not None
        if piece.key not in self.image_embeddings:
            embeddings = self._vision_encoder.encode(piece.inputs, piece.num_tokens)
            mx.eval(embeddings)
            self.image_embeddings.put(piece.key, embeddings)

    def score(self, piece: ScoringPiece) -> np.ndarray | None:
        """Read a part of a prompt for its scores: a unit of work of its own, between steps.

        Returns the scores of all its tokens after the last part. One prompt is scored at a time.
        """
        assert self._scorer is not None
        token_ids = piece.prompt_ids[piece.start : piece.end]
        self._scorer.read(token_ids, piece.start, len(piece.prompt_ids))
        return self._scorer.scores() if piece.is_last else None

    def reset(self) -> None:
        """Drop all cells, for instance after a step that failed half-way."""
        if self._scorer is not None:
            self._scorer.drop()
        self._tell(step_message.RESET)
        self._versions.clear()
        self._resize(0, 0)
        self._resize_blocks(0)

    def clear_prefixes(self) -> None:
        self._tell(step_message.CLEAR_PREFIXES)
        self._prefixes.clear()

    def _buffers(self) -> Iterator[Buffers]:
        return self._forward.buffers()

    def _cache_arrays(self) -> list[mx.array]:
        return [array for buffers in self._buffers() for array in buffers.arrays()]

    def _arrange(self, plan: StepPlan) -> None:
        """Save cells as the last step left them; move, resize; then load cached cells."""
        if not plan.is_overlapped:
            self._restore(plan.restores)
        self._save(plan.copies)
        for move in plan.moves:
            for buffers in self._in_slots():
                buffers.exchange(move.source, move.target, move.one_way)
        if (plan.num_slots, plan.capacity) != (self._num_slots, self._capacity):
            self._resize(plan.num_slots, plan.capacity)
        if plan.num_blocks != self._num_blocks or plan.kept_blocks is not None:
            self._resize_blocks(plan.num_blocks, plan.kept_blocks)
        for arrival in plan.copies.arrivals:
            self._prefixes.from_host(arrival.id, self._arrays_of(arrival))
        for load in plan.copies.loads:
            if load.row_blocks:
                self._prefixes.load_into_blocks(load.row_blocks, load.pieces)
            elif load.pieces:
                self._prefixes.load_blocks(load.slot, load.start, load.pieces)
            if load.state_id is not None:
                self._prefixes.load_state(load.state_id, load.slot)

    def _restore(self, restores: Sequence[RestoreState]) -> None:
        for restore in restores:
            for state, version in zip(self._states(), self._versions[-restore.age], strict=True):
                state.restore(restore.slot, version)
        self._versions.clear()

    def _states(self) -> list[RecurrentState]:
        return [buffers for buffers in self._buffers() if isinstance(buffers, RecurrentState)]

    def _arrays_of(self, arrival: Arrival) -> Mapping[str, HostArray]:
        if arrival.arrays:
            return arrival.arrays
        if self._read_block is None:
            raise ValueError("rank 0 keeps cached prefixes on disk: start all ranks with --prefix-cache-dir")
        return self._read_block(arrival.file_name)

    def _in_slots(self) -> list[Buffers]:
        """The buffers with a place for each slot. Cells in blocks have none."""
        return [one for one in self._buffers() if self._block_size is None or isinstance(one, RecurrentState)]

    def _resize(self, num_slots: int, capacity: int) -> None:
        for buffers in self._in_slots():
            buffers.resize(num_slots, capacity)
        self._num_slots, self._capacity = num_slots, capacity

    def _resize_blocks(self, num_blocks: int, kept: Sequence[int] | None = None) -> None:
        if self._block_size is None:
            return
        for buffers in self._buffers():
            if isinstance(buffers, RaggedKV):
                buffers.resize_blocks(num_blocks, self._block_size, kept)
        self._num_blocks = num_blocks

    def _save(self, copies: PrefixCopies) -> None:
        if not copies:
            return
        store = self._prefixes
        store.drop(copies.drops)
        if self._block_size is not None:
            store.save_row_blocks(copies.saves)
        else:
            for run in _neighbouring(copies.saves):
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


def _width(batch: Batch, shape: PassShape) -> int:
    """Columns of a pass."""
    return max(shape.width, *(row.num_fed for row in batch))


def _neighbouring(saves: Sequence[SaveCells]) -> list[list[SaveCells]]:
    """Saves of neighbouring cells of one slot, grouped: each group is one copy."""
    runs: list[list[SaveCells]] = []
    for save in saves:
        last = runs[-1][-1] if runs else None
        if last is not None and (last.slot, last.end) == (save.slot, save.start):
            runs[-1].append(save)
        else:
            runs.append([save])
    return runs
