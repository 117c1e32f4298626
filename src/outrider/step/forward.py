"""One forward pass over a batch, as array expressions: nothing in it waits for the device or reads a result.

    trunk    [rows, width] token ids -> hidden states; each row writes its own cells
    verify   target tokens after each row's last committed token and after each draft; accepted drafts
    commit   accepted drafts become committed tokens; recurrent states follow
    draft    the head is fed the pairs (hidden state, next token) and drafts for the next step

(The one exception: a sampler that checks whether its candidates were enough. See sampling/sampler.py.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

from outrider.cache.embedding_cache import EmbeddingCache
from outrider.cache.placement import Placement
from outrider.models.heads import LoadedHead
from outrider.models.trunk import Buffers, Trunk, TrunkCache
from outrider.step.batch import Batch, InputBatch, PassOutput, image_inputs, positions_of
from outrider.step.deferred_head import DeferredHeadInputs
from outrider.step.mtp import HeadRows, MTPDrafter
from outrider.step.verify import SamplingBatch, max_targets, next_tokens, num_committed_tokens, verify


class Forward:
    """Runs passes of one model and owns its row caches."""

    def __init__(
        self,
        trunk: Trunk,
        head: LoadedHead | None,
        image_embeddings: EmbeddingCache | None,
        block_size: int | None = None,
    ) -> None:
        """`block_size`: of the rows' blocks; None: rows keep their cells by slots."""
        self.block_size = block_size or 0
        self._trunk = trunk
        self._image_embeddings = image_embeddings
        self._drafter = MTPDrafter(head, trunk) if head is not None else None
        self._deferred = DeferredHeadInputs(trunk) if head is not None else None
        self._cache = TrunkCache(trunk.layout)

    @property
    def has_head(self) -> bool:
        return self._drafter is not None

    @property
    def vocab_size(self) -> int:
        return self._trunk.vocab_size

    @property
    def head_may_run_on_all_rows(self) -> bool:
        """Whether the head may run over rows that feed it nothing, and leave their cells alone."""
        return self._drafter is not None and self._drafter.num_layers == 1

    def buffers(self) -> Iterator[Buffers]:
        yield from self._cache.buffers()
        if self._drafter is not None:
            yield from self._drafter.buffers()
        if self._deferred is not None:
            yield self._deferred.kv

    def drafting_rows(self, batch: Batch) -> list[int]:
        """Rows that the head follows in this pass."""
        return [i for i, row in enumerate(batch) if row.feeds_head] if self.has_head else []

    def __call__(self, batch: Batch, inputs: InputBatch, capacity: int) -> PassOutput:
        sampling = SamplingBatch.of(
            batch, self.drafting_rows(batch), max_targets(batch), self._trunk.vocab_size
        )
        ends = [row.start + row.num_fed for row in batch]
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
    ) -> PassOutput:
        """All fed cells are below `end`. `launches`, `ends`: see Placement; not for traced passes."""
        width = inputs.token_ids.shape[1]
        embeddings: mx.array | None = None
        deepstack: list[mx.array] = []
        if (images := image_inputs(batch, self._image_embeddings)) is not None:
            embeddings = images.put_into(self._trunk.embed(inputs.token_ids))
            deepstack = images.levels(embeddings)
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
        )
        hidden = self._trunk.hidden(inputs.token_ids, self._cache, place, embeddings)
        verified = verify(self._trunk, hidden, batch, inputs, sampling)
        num_committed = num_committed_tokens(inputs, verified)
        self._cache.commit(num_committed)
        if self._deferred is not None and any(row.defers_head for row in batch):
            self._deferred.store(hidden, place)
        drafting, drafts = self.drafting_rows(batch), None
        if drafting:
            assert self._drafter is not None and self._deferred is not None
            next_ids = next_tokens(batch, inputs, verified)
            rows = [batch[i] for i in drafting]
            starts, head_fed, deltas = inputs.starts, inputs.head_fed, inputs.position_deltas
            tables = inputs.tables
            head_hidden, head_committed = hidden, num_committed
            if len(drafting) < len(batch):
                index = mx.array(drafting)
                head_hidden, next_ids, head_committed = hidden[index], next_ids[index], num_committed[index]
                starts, head_fed = starts[index], head_fed[index]
                deltas = None if deltas is None else deltas[index]
                tables = None if tables is None else tables[index]
            head_rows = HeadRows(
                slots=[row.slot for row in rows],
                starts=starts,
                num_fed=head_fed,
                num_committed=head_committed,
                end=end,
                sampler=sampling.draft_sampler,
                depth=max(row.num_drafts_next for row in rows),
                positions=positions_of(rows, starts, width, deltas),
                position_deltas=deltas,
                images=image_inputs(rows, self._image_embeddings, offset=1),
                with_margins=launches,
                tables=tables,
                block_size=self.block_size,
                ends=None if ends is None else [ends[i] for i in drafting],
            )
            fed = self._deferred.catch_up(rows, head_hidden, next_ids, head_rows, capacity)
            drafts = self._drafter.draft(*fed, capacity)
        return PassOutput.of(batch, verified, drafting, drafts, hidden, inputs.starts + num_committed)


def end_of(batch: Batch) -> int:
    return max(row.start + row.num_fed for row in batch)
