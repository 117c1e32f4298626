"""One pass over a batch, as array expressions: nothing in it waits for the device or reads a result.

    trunk   [rows, width] tokens -> hidden states
    targets for each picking row, at its last committed token and at each draft: processors, then pick
    accept  drafts while they equal the targets; kept = committed + accepted; recurrent layers commit that
    head    inputs the pairs (hidden, next token), recurse for the next drafts

(But for filters that look whether their candidates were enough: see sampling/picking.)
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from outrider.cache.embedding_cache import EmbeddingCache
from outrider.cache.ragged_kv import Placement
from outrider.models.heads import LoadedHead
from outrider.models.trunk import Buffers, Trunk, TrunkCache
from outrider.sampling.sampler import Sampler
from outrider.step.deferred_head import DeferredHeadInputs
from outrider.step.images import image_inputs, positions_of
from outrider.step.input_batch import Batch, InputBatch
from outrider.step.mtp import HeadRows, MTPDrafter
from outrider.step.pass_output import PassOutput
from outrider.step.sampling_batch import SamplingBatch, most_picks
from outrider.step.verify import kept_tokens, next_tokens, verify


class Forward:
    """Owns the caches of one model."""

    def __init__(
        self, trunk: Trunk, head: LoadedHead | None, image_embeddings: EmbeddingCache | None
    ) -> None:
        self._trunk = trunk
        self._image_embeddings = image_embeddings
        self._drafter = MTPDrafter(head, trunk) if head is not None else None
        self._deferred = DeferredHeadInputs(trunk) if head is not None else None
        self._cache = TrunkCache(trunk.layout)

    @property
    def has_head(self) -> bool:
        return self._drafter is not None

    def buffers(self) -> Iterator[Buffers]:
        yield from self._cache.buffers()
        if self._drafter is not None:
            yield from self._drafter.buffers()
        if self._deferred is not None:
            yield self._deferred.kv

    @property
    def head_passes_all(self) -> bool:
        """Whether the head may be run over rows that it is not fed, and leaves their cells alone."""
        return self._drafter is not None and self._drafter.num_layers == 1

    def drafting(self, batch: Batch) -> list[int]:
        """Rows that the head follows in this pass."""
        return [i for i, row in enumerate(batch) if row.feeds_head] if self.has_head else []

    @property
    def vocab_size(self) -> int:
        return self._trunk.vocab_size

    def __call__(self, batch: Batch, inputs: InputBatch, capacity: int) -> PassOutput:
        sampling = SamplingBatch.of(batch, self.drafting(batch), most_picks(batch), self.vocab_size)
        return self.run(batch, inputs, sampling, last_cell(batch), capacity)

    def run(
        self, batch: Batch, inputs: InputBatch, sampling: SamplingBatch, end: int, capacity: int
    ) -> PassOutput:
        """`end`: no row's last fed cell is beyond this."""
        width = inputs.token_ids.shape[1]
        positions = positions_of(batch, inputs.starts, width, inputs.deltas)
        slots = [row.slot for row in batch]
        place = Placement(
            slots,
            inputs.starts,
            inputs.num_fed,
            width,
            end,
            capacity,
            any_new=any(row.start == 0 for row in batch),
            positions=positions,
            keeps_all=not any(row.num_drafts for row in batch),
        )
        images = image_inputs(batch, self._image_embeddings)
        embeddings = None
        if images is not None:
            embeddings = images.put_into(self._trunk.embed(inputs.token_ids))
            place.added = images.levels(embeddings)
        hidden = self._trunk.hidden(inputs.token_ids, self._cache, place, embeddings)
        picks = verify(self._trunk, hidden, batch, inputs, sampling)
        num_kept = kept_tokens(inputs, picks)
        self._cache.commit(num_kept)
        if self._deferred is not None and any(row.defers_head for row in batch):
            self._deferred.keep(hidden, place)
        drafting, drafts = self.drafting(batch), None
        if drafting:
            next_ids = next_tokens(batch, inputs, picks)
            drafts = self._draft(
                batch, drafting, (hidden, next_ids, num_kept), inputs, sampling.drafts, end, capacity
            )
        return PassOutput.of(batch, picks, drafting, drafts, hidden, inputs.starts + num_kept)

    def _draft(
        self,
        batch: Batch,
        drafting: list[int],
        found: tuple[mx.array, mx.array, mx.array],
        inputs: InputBatch,
        how: Sampler,
        end: int,
        capacity: int,
    ) -> mx.array | None:
        """Feed the head what is now committed and let it draft for the next step."""
        assert self._drafter is not None and self._deferred is not None
        hidden, next_ids, num_kept = found
        rows = [batch[i] for i in drafting]
        starts, num_fed, deltas = inputs.starts, inputs.head_fed, inputs.deltas
        if len(drafting) < len(batch):
            some = mx.array(drafting)
            hidden, next_ids, num_kept = hidden[some], next_ids[some], num_kept[some]
            starts, num_fed = starts[some], num_fed[some]
            deltas = None if deltas is None else deltas[some]
        head_rows = HeadRows(
            slots=[row.slot for row in rows],
            starts=starts,
            num_fed=num_fed,
            num_kept=num_kept,
            end=end,
            how=how,
            depth=max(row.num_drafts_next for row in rows),
            positions=positions_of(rows, starts, hidden.shape[1], deltas),
            deltas=deltas,
            images=image_inputs(rows, self._image_embeddings, ahead=1),
        )
        fed = self._deferred.catch_up(rows, hidden, next_ids, head_rows, capacity)
        return self._drafter.draft(*fed, capacity)


def last_cell(batch: Batch) -> int:
    return max(row.start + row.num_fed for row in batch)
