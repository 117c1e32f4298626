"""One pass over a batch, as array expressions: nothing in it waits for the device or reads a result.

    trunk   [rows, width] tokens -> hidden states
    targets for each picking row, at its last committed token and at each draft: edits, then pick
    accept  drafts while they equal the targets; kept = committed + accepted; recurrent layers commit that
    head    feed the pairs (hidden, next token), recurse for the next drafts

(But for filters that look whether their candidates were enough: see sampling/picking.)
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from outrider.cache.embedding_cache import EmbeddingCache
from outrider.cache.ragged_kv import Placement
from outrider.models.heads import LoadedHead
from outrider.models.trunk import Buffers, Trunk, TrunkCache
from outrider.sampling.sampler import Picking
from outrider.step.deferred_head import RestingStates
from outrider.step.images import positions_of, seen_in
from outrider.step.input_batch import Batch, Feed
from outrider.step.mtp import HeadRows, MTPDrafter
from outrider.step.pass_output import Flight
from outrider.step.sampling_batch import Ways, most_picks
from outrider.step.verify import kept_tokens, next_tokens, verify


class Forward:
    """Owns the caches of one model."""

    def __init__(self, trunk: Trunk, head: LoadedHead | None, shelf: EmbeddingCache | None) -> None:
        self._trunk = trunk
        self._shelf = shelf
        self._drafter = MTPDrafter(head, trunk) if head is not None else None
        self._resting = RestingStates(trunk) if head is not None else None
        self._cache = TrunkCache(trunk.layout)

    @property
    def has_head(self) -> bool:
        return self._drafter is not None

    def buffers(self) -> Iterator[Buffers]:
        yield from self._cache.buffers()
        if self._drafter is not None:
            yield from self._drafter.buffers()
        if self._resting is not None:
            yield self._resting.kv

    @property
    def head_passes_all(self) -> bool:
        """Whether the head may be run over rows that it is not fed, and leaves their cells alone."""
        return self._drafter is not None and self._drafter.num_layers == 1

    def heading(self, batch: Batch) -> list[int]:
        """Rows that the head follows in this pass."""
        return [i for i, row in enumerate(batch) if row.feeds_head] if self.has_head else []

    @property
    def vocab_size(self) -> int:
        return self._trunk.vocab_size

    def __call__(self, batch: Batch, feed: Feed, capacity: int) -> Flight:
        ways = Ways.of(batch, self.heading(batch), most_picks(batch), self.vocab_size)
        return self.run(batch, feed, ways, last_cell(batch), capacity)

    def run(self, batch: Batch, feed: Feed, ways: Ways, end: int, capacity: int) -> Flight:
        """`end`: no row's last fed cell is beyond this."""
        width = feed.token_ids.shape[1]
        positions = positions_of(batch, feed.starts, width, feed.deltas)
        slots = [row.slot for row in batch]
        place = Placement(
            slots,
            feed.starts,
            feed.num_fed,
            width,
            end,
            capacity,
            any_new=any(row.start == 0 for row in batch),
            positions=positions,
            keeps_all=not any(row.num_drafts for row in batch),
        )
        seen = seen_in(batch, self._shelf)
        embeddings = None
        if seen is not None:
            embeddings = seen.put_into(self._trunk.embed(feed.token_ids))
            place.added = seen.levels(embeddings)
        hidden = self._trunk.hidden(feed.token_ids, self._cache, place, embeddings)
        picks = verify(self._trunk, hidden, batch, feed, ways)
        num_kept = kept_tokens(feed, picks)
        self._cache.commit(num_kept)
        if self._resting is not None and any(row.rests for row in batch):
            self._resting.keep(hidden, place)
        heading, drafts = self.heading(batch), None
        if heading:
            next_ids = next_tokens(batch, feed, picks)
            drafts = self._draft(
                batch, heading, (hidden, next_ids, num_kept), feed, ways.drafts, end, capacity
            )
        return Flight.of(batch, picks, heading, drafts, hidden, feed.starts + num_kept)

    def _draft(
        self,
        batch: Batch,
        heading: list[int],
        found: tuple[mx.array, mx.array, mx.array],
        feed: Feed,
        how: Picking,
        end: int,
        capacity: int,
    ) -> mx.array | None:
        """Feed the head what is now committed and let it draft for the next step."""
        assert self._drafter is not None and self._resting is not None
        hidden, next_ids, num_kept = found
        rows = [batch[i] for i in heading]
        starts, num_fed, deltas = feed.starts, feed.head_fed, feed.deltas
        if len(heading) < len(batch):
            some = mx.array(heading)
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
            seen=seen_in(rows, self._shelf, ahead=1),
        )
        fed = self._resting.catch_up(rows, hidden, next_ids, head_rows, capacity)
        return self._drafter.draft(*fed, capacity)


def last_cell(batch: Batch) -> int:
    return max(row.start + row.num_fed for row in batch)
