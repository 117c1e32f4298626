"""One forward pass over a batch, as array expressions: nothing in it waits for the device or reads a result.

    trunk    [rows, width] token ids -> hidden states; each row writes its own cells
    verify   target tokens after each row's last committed token and after each draft; accepted drafts
    commit   accepted drafts become committed tokens; recurrent states follow
    draft    the head is fed the pairs (hidden state, next token), or the draft model the tokens, and drafts
             for the next step

(The one exception: a sampler that checks whether its candidates were enough. See sampling/sampler.py.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import mlx.core as mx

from outrider.cache.embedding_cache import EmbeddingCache
from outrider.cache.placement import GridPositions, Placement, num_cells_of
from outrider.cache.recurrent import RecurrentState
from outrider.models.adapters.store import ArraysByPath, TracedArrays
from outrider.models.divided_output import DividedOutput
from outrider.models.trunk import Buffers, Trunk, TrunkCache
from outrider.speculate.shapes import CELL_PARTS, CELL_STEP, rounded_up
from outrider.step.batch import (
    Batch,
    InputBatch,
    PassOutput,
    head_positions_of,
    image_inputs,
    positions_of,
    span_of,
)
from outrider.step.deferred_head import FollowedRows
from outrider.step.device_drafter import LoadedDrafter, is_divided, new_device_drafter
from outrider.step.head_rows import HeadRows
from outrider.step.prompt_logprobs import prompt_logprobs
from outrider.step.ranks import Ranks
from outrider.step.step_message import PassMedia
from outrider.step.verify import (
    SamplingBatch,
    join_logits,
    max_targets,
    next_tokens,
    num_committed_tokens,
    verify,
)


class Forward:
    """Runs passes of one model and owns its row caches."""

    def __init__(
        self,
        trunk: Trunk,
        drafter: LoadedDrafter | None,
        image_embeddings: EmbeddingCache | None,
        block_size: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`block_size`: of the rows' blocks; None: rows keep their cells by slots.

        `ranks`: if the model runs on several ranks. Then all other ranks `follow` each pass of rank 0.
        """
        self.block_size = block_size or 0
        self._ranks = ranks
        self._trunk = trunk
        self._image_embeddings = image_embeddings
        self._divided = None if ranks is None else DividedOutput(trunk, ranks.group)
        self._drafter = None
        if drafter is not None:
            self._drafter = new_device_drafter(drafter, trunk, ranks, self._divided)
        self.has_divided_head = is_divided(drafter)
        self._cache = TrunkCache(trunk.layout)

    @property
    def adapter_arrays(self) -> TracedArrays:
        """What a traced pass of rows with adapters takes as inputs."""
        return self._trunk.adapters.traced

    @property
    def has_head(self) -> bool:
        return self._drafter is not None

    @property
    def vocab_size(self) -> int:
        return self._trunk.vocab_size

    @property
    def head_may_run_on_all_rows(self) -> bool:
        """Whether the head may run over rows that feed it nothing, and leave their cells alone."""
        return self._drafter is not None and self._drafter.may_run_on_all_rows

    def buffers(self) -> Iterator[Buffers]:
        yield from self._cache.buffers()
        if self._drafter is not None:
            yield from self._drafter.buffers()

    def drafting_rows(self, batch: Batch) -> list[int]:
        """Rows that the head follows in this pass."""
        return [i for i, row in enumerate(batch) if row.feeds_head] if self.has_head else []

    def __call__(
        self, batch: Batch, inputs: InputBatch, capacity: int, few_shapes: bool = False
    ) -> PassOutput:
        """`few_shapes`: attention reads a rounded number of cells, so that the same shapes come again. For
        each new shape MLX has to plan its attention on CUDA, which may take longer than the pass."""
        sampling = SamplingBatch.of(
            batch, self.drafting_rows(batch), max_targets(batch), self._trunk.vocab_size
        )
        ends = [row.start + row.num_fed for row in batch]
        if few_shapes:
            most = capacity if inputs.tables is None else num_cells_of(inputs.tables, self.block_size)
            ends = [min(most, rounded_up(end, CELL_STEP, CELL_PARTS)) for end in ends]
        return self.run(batch, inputs, sampling, max(ends), capacity, launches=True, ends=ends)

    def run(
        self,
        batch: Batch,
        inputs: InputBatch,
        sampling: SamplingBatch,
        end: int,
        capacity: int,
        launches: bool = False,
        ends: Sequence[int] | None = None,
        adapter_arrays: ArraysByPath | None = None,
    ) -> PassOutput:
        """All fed cells are below `end`. `launches`, `ends`: see Placement; not for traced passes.

        `adapter_arrays`: the adapters' arrays as inputs of a traced pass.
        """
        width = inputs.token_ids.shape[1]
        token_ids = inputs.token_ids
        embeddings: mx.array | None = None
        deepstack: list[mx.array] = []
        if (images := image_inputs(batch, self._image_embeddings)) is not None:
            embeddings = images.put_into(self._trunk.embed(token_ids))
            deepstack = images.levels(embeddings)
            token_ids = images.blank(token_ids)
            if self._ranks is not None:
                if deepstack:
                    raise ValueError("image features of deeper layers are not sent to other ranks")
                embeddings = self._ranks.from_first(embeddings)
                mx.eval(embeddings)
        place = Placement(
            [row.slot for row in batch],
            inputs.starts,
            inputs.num_fed,
            width,
            end,
            capacity,
            any_new=any(row.start == 0 for row in batch),
            positions=positions_of(batch, inputs.starts, width, inputs.position_deltas),
            commits_all=not any(row.num_drafts for row in batch),
            deepstack=deepstack,
            launches=launches,
            tables=inputs.tables,
            block_size=self.block_size,
            ends=ends,
            span=span_of(batch),
            adapters=self._trunk.adapters.of_pass(inputs.adapters, adapter_arrays),
        )
        hidden = self._trunk.hidden(token_ids, self._cache, place, embeddings)
        if self._ranks is not None:
            mx.async_eval(hidden)  # see `follow`
        verified = verify(self._trunk, hidden, batch, inputs, sampling, self._divided)
        num_committed = num_committed_tokens(inputs, verified)
        if self._ranks is not None and self._waits_for_rank_0(batch, place):
            num_committed = self._ranks.launched_from_first(num_committed)
        self._cache.commit(num_committed)
        if self._drafter is not None and any(row.defers_head for row in batch):
            self._drafter.defer(hidden, place)
        drafting, drafts = self.drafting_rows(batch), None
        if drafting:
            assert self._drafter is not None
            rows = _head_rows(batch, drafting, inputs, num_committed, end, ends, self.block_size)
            rows = replace(
                rows,
                sampler=sampling.draft_sampler,
                images=image_inputs([batch[i] for i in drafting], self._image_embeddings, offset=1),
                with_margins=launches,
            )
            next_ids = next_tokens(batch, inputs, verified)
            followed = _followed_rows(batch, drafting, inputs, hidden, next_ids, rows)
            drafts = self._drafter.draft(followed, capacity)
        prompts = prompt_logprobs(self._trunk, hidden, batch)
        ends_now = inputs.starts + num_committed
        return PassOutput.of(batch, verified, drafting, drafts, hidden, ends_now, prompts)

    # -- several ranks -----------------------------------------------------------------------------------

    def follow(self, batch: Batch, inputs: InputBatch, capacity: int, media: PassMedia) -> None:
        """Run the trunk and a divided head as rank 0 does now, and commit the tokens that rank 0 commits.

        Operations of all ranks have to come in the same order everywhere. So they are launched where they are
        built, here and in `run`: the sums of the layers, the logits, the number of committed tokens, those of
        the head. (Not the cells: MLX would hold them, and the next pass of the step copy them.)
        """
        assert self._ranks is not None and self._divided is not None
        width, ends = inputs.token_ids.shape[1], [row.start + row.num_fed for row in batch]
        positions = positions_of(batch, inputs.starts, width, inputs.position_deltas)
        if media.positions is not None:
            positions = GridPositions(mx.array(media.positions))
        embeddings = None
        if media.has_images:
            shape = (*inputs.token_ids.shape, self._trunk.hidden_size)
            embeddings = self._ranks.from_first(mx.zeros(shape, self._trunk.dtype))
            mx.eval(embeddings)
        place = Placement(
            [row.slot for row in batch],
            inputs.starts,
            inputs.num_fed,
            width,
            max(ends),
            capacity,
            any_new=any(row.start == 0 for row in batch),
            positions=positions,
            commits_all=not any(row.num_drafts for row in batch),
            launches=True,
            tables=inputs.tables,
            block_size=self.block_size,
            ends=ends,
            adapters=self._trunk.adapters.of_pass(inputs.adapters),
        )
        hidden = self._trunk.hidden(inputs.token_ids, self._cache, place, embeddings)
        mx.async_eval(hidden)
        join_logits(self._divided, hidden, batch)
        num_committed = inputs.num_fed
        if self._waits_for_rank_0(batch, place):
            num_committed = self._ranks.launched_from_first(num_committed)
        self._cache.commit(num_committed)
        self._follow_head(batch, inputs, hidden, num_committed, place, media)

    def _follow_head(
        self,
        batch: Batch,
        inputs: InputBatch,
        hidden: mx.array,
        num_committed: mx.array,
        place: Placement,
        media: PassMedia,
    ) -> None:
        """Run this rank's part of a divided head."""
        if self._drafter is None:
            return
        if any(row.defers_head for row in batch):
            self._drafter.defer(hidden, place)
        if not (drafting := self.drafting_rows(batch)):
            return
        ends = [row.start + row.num_fed for row in batch]
        rows = _head_rows(batch, drafting, inputs, num_committed, max(ends), ends, self.block_size)
        rows = replace(rows, has_images=media.head_has_images)
        if media.head_positions is not None:
            rows = replace(rows, positions=GridPositions(mx.array(media.head_positions)))
        followed = _followed_rows(batch, drafting, inputs, hidden, inputs.token_ids, rows)
        self._drafter.draft(followed, place.capacity)

    def _waits_for_rank_0(self, batch: Batch, place: Placement) -> bool:
        """Whether other ranks have to be told how many tokens are committed.

        For recurrent states and divided heads only. Other layers write rejected drafts again.
        """
        if place.commits_all:
            return False
        if self.has_divided_head and self.drafting_rows(batch):
            return True
        return any(isinstance(one, RecurrentState) for one in self._cache.buffers())


def _head_rows(
    batch: Batch,
    drafting: Sequence[int],
    inputs: InputBatch,
    num_committed: mx.array,
    end: int,
    ends: Sequence[int] | None,
    block_size: int,
) -> HeadRows:
    """The rows that the head follows, without what only rank 0 knows. `end`, `ends`: see Forward.run."""
    rows, width = [batch[i] for i in drafting], inputs.token_ids.shape[1]
    starts = _rows_of(inputs.starts, drafting)
    deltas = None if inputs.position_deltas is None else _rows_of(inputs.position_deltas, drafting)
    return HeadRows(
        slots=[row.slot for row in rows],
        starts=starts,
        num_fed=_rows_of(inputs.head_fed, drafting),
        num_committed=_rows_of(num_committed, drafting),
        end=end,
        sampler=None,
        depth=max(row.num_drafts_next for row in rows),
        positions=head_positions_of(rows, starts, width, deltas),
        position_deltas=deltas,
        tables=None if inputs.tables is None else _rows_of(inputs.tables, drafting),
        block_size=block_size,
        ends=None if ends is None else [ends[i] for i in drafting],
    )


def _followed_rows(
    batch: Batch,
    drafting: Sequence[int],
    inputs: InputBatch,
    hidden: mx.array,
    next_ids: mx.array,
    rows: HeadRows,
) -> FollowedRows:
    token_ids, hidden, next_ids = (
        _rows_of(array, drafting) for array in (inputs.token_ids, hidden, next_ids)
    )
    return FollowedRows([batch[i] for i in drafting], token_ids, hidden, next_ids, rows)


def _rows_of(array: mx.array, rows: Sequence[int]) -> mx.array:
    """[all rows, ...] -> [rows, ...]"""
    return array if len(rows) == array.shape[0] else array[mx.array([*rows])]


def end_of(batch: Batch) -> int:
    return max(row.start + row.num_fed for row in batch)
