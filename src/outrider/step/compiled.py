"""Decode passes, traced once a shape and replayed: the host hands over arrays and builds no graph.

A trace holds for all batches of one key: everything that a pass reads off its rows, other than arrays. Rows
that read a prompt are not traced.

Ghosts make a batch as large as one that was traced. They stand in the slots after the batch's own rows, feed
nothing and pick what nobody reads: whoever has such a slot finds it as it was.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from outrider.cache.ragged_kv import nothing_launched
from outrider.models.trunk import Buffers
from outrider.plan import RowPlan
from outrider.request import SamplingParams
from outrider.sampling.logprobs import LogprobArrays
from outrider.speculate.shapes import CELL_PARTS, CELL_STEP, rounded_up
from outrider.step.forward import Forward, last_cell
from outrider.step.input_batch import Batch, Feed, Outcome
from outrider.step.pass_output import Flight
from outrider.step.sampling_batch import Ways
from outrider.step.verify import Picks

GHOST = -1
NOTHING_ASKED = SamplingParams(temperature=0)  # in a trace: what rows ask for is in its ways
MOST_TRACES = 128

Traced = Callable[[list[Any], list[list[mx.array]]], tuple[list[mx.array], list[list[mx.array]]]]


def repeats(batch: Batch) -> bool:
    """Whether a batch is of the kind that comes again: rows that decode.

    Such rows are in the first slots; others read the end of a prompt, or are run alone after a fault.
    """
    return [row.slot for row in batch] == list(range(len(batch))) and all(
        row.picks
        and row.start > 0
        and row.first_pick == 0
        and row.media is None
        and not (row.feeds_head and row.num_behind)
        for row in batch
    )


def ghosts_for(batch: Batch, num_rows: int) -> Batch:
    """What a batch in the first slots lacks of so many rows."""
    return [_ghost(slot, batch[-1]) for slot in range(len(batch), num_rows)]


def _ghost(slot: int, like: RowPlan) -> RowPlan:
    """Picks like another row, so that it needs no kind of its own."""
    return RowPlan(
        sequence_id=GHOST,
        slot=slot,
        start=1,  # not a row that has just come
        token_ids=(),
        num_drafts=0,
        next_id=None,
        feeds_head=False,
        num_drafts_next=0,
        params=like.params,
        history=(),
        num_prompt=0,
    )


class CompiledPasses:
    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._traces: OrderedDict[Hashable, Traced] = OrderedDict()

    @property
    def num_traces(self) -> int:
        return len(self._traces)

    def __call__(self, batch: Batch, ghosts: Batch, feed: Feed, shape: tuple[int, int]) -> Flight:
        """`feed` is that of the batch and its ghosts, `shape` the slots and the capacity of the caches."""
        width = feed.token_ids.shape[1]
        rows = self._alike([*batch, *ghosts], width)
        heading = self._forward.heading(rows)
        ways = Ways.of([*batch, *ghosts], heading, width, self._forward.vocab_size, merged=True)
        end = min(shape[1], rounded_up(last_cell(batch), CELL_STEP, CELL_PARTS))
        key = _key(rows, feed, ways, end, shape)
        known = self._traces.get(key)
        traced = known or self._trace(rows, ways.without_arrays(), end, shape[1])
        found, arrays = traced([feed.arrays, ways.arrays], self._arrays())
        self._put(arrays)
        self._keep(key, traced)
        return _flight(batch, len(rows), heading, found, ways.logprobs is not None, known is None)

    def _keep(self, key: Hashable, traced: Traced) -> None:
        """One that has run; those that were not used for longest go."""
        self._traces[key] = traced
        self._traces.move_to_end(key)
        if len(self._traces) > MOST_TRACES:
            self._traces.popitem(last=False)

    def _alike(self, batch: Batch, width: int) -> Batch:
        """The rows as a trace sees them: without what arrays say, so that few traces do for many batches.

        All feed, draft and pick as much as there is room for: how much each really does is in the feed. The
        head passes over all of them where it follows some: what it is fed is `Feed.head_fed`.
        """
        any_head, any_rests = any(row.feeds_head for row in batch), any(row.rests for row in batch)
        alike = self._forward.head_passes_all
        return [
            replace(
                row,
                token_ids=(0,) * width,
                num_drafts=width - 1,
                params=NOTHING_ASKED,
                history=(),
                banned_ids=(),
                masks=None,
                position_delta=0,
                head_start=None,  # nor have they anything to catch up with
                feeds_head=any_head if alike else row.feeds_head,
                rests=any_rests,
            )
            for row in batch
        ]

    def _trace(self, batch: Batch, ways: Ways, end: int, capacity: int) -> Traced:
        def run(
            inputs: list[Any], caches: list[list[mx.array]]
        ) -> tuple[list[mx.array], list[list[mx.array]]]:
            fed, numbers = inputs
            self._put(caches)
            with nothing_launched():
                flight = self._forward.run(batch, Feed(*fed), ways.with_arrays(numbers), end, capacity)
            return _outputs(flight), self._arrays()

        return mx.compile(run)

    def _buffers(self) -> list[Buffers]:
        return list(self._forward.buffers())

    def _arrays(self) -> list[list[mx.array]]:
        return [list(buffers.arrays()) for buffers in self._buffers()]

    def _put(self, arrays: Sequence[Sequence[mx.array]]) -> None:
        for buffers, own in zip(self._buffers(), arrays, strict=True):
            buffers.put(own)


def _key(batch: Batch, feed: Feed, ways: Ways, end: int, shape: tuple[int, int]) -> Hashable:
    return (
        feed.token_ids.shape,
        end,
        shape,
        ways.key,
        feed.deltas is None,
        tuple((row.slot, row.feeds_head, row.rests) for row in batch),
        max((row.num_drafts_next for row in batch if row.feeds_head), default=0),
    )


def _outputs(flight: Flight) -> list[mx.array]:
    picks, outcome = flight.picks, flight.outcome
    assert picks is not None and outcome is not None
    found = [picks.targets, picks.num_accepted, picks.is_sound, flight.report, outcome.last_ids, outcome.ends]
    if picks.logprobs is not None:
        found += picks.logprobs.arrays
    if flight.drafts is not None:
        assert outcome.drafts is not None
        found += [flight.drafts, outcome.drafts]
    return found


def _flight(
    batch: Batch,
    num_rows: int,
    heading: list[int],
    found: Sequence[mx.array],
    has_logprobs: bool,
    is_traced: bool,
) -> Flight:
    """From what `_outputs` gave."""
    targets, num_accepted, is_sound, report, last_ids, ends, *more = found
    logprobs = None
    if has_logprobs:
        logprobs = LogprobArrays(tuple(range(num_rows)), *more[:3])
        more = more[3:]
    drafts, spread = more or (None, None)
    picks = Picks(list(range(num_rows)), targets, num_accepted, is_sound, logprobs)
    return Flight(batch, picks, heading, drafts, Outcome(last_ids, ends, spread), report, is_traced)
