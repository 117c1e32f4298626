"""Decode passes, traced once a shape and replayed: the host hands over arrays and builds no graph.

A trace holds for all batches of one key: everything that a pass reads off its rows, other than arrays. Rows
that read a prompt are not traced.

Padding rows make a batch as large as one that was traced. They stand in the slots after the batch's own
rows, feed nothing and pick what nobody reads: whoever has such a slot finds it as it was.
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
from outrider.step.input_batch import Batch, InputBatch, NextInputs
from outrider.step.pass_output import PassOutput
from outrider.step.sampling_batch import SamplingBatch
from outrider.step.verify import Picks

PADDING_ID = -1
NOTHING_ASKED = SamplingParams(temperature=0)  # in a trace: what rows ask for is in its sampling
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


def padding_rows(batch: Batch, num_rows: int) -> Batch:
    """What a batch in the first slots lacks of so many rows."""
    return [_padding_row(slot, batch[-1]) for slot in range(len(batch), num_rows)]


def _padding_row(slot: int, like: RowPlan) -> RowPlan:
    """Picks like another row, so that it needs no kind of its own."""
    return RowPlan(
        sequence_id=PADDING_ID,
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

    def __call__(
        self, batch: Batch, padding: Batch, inputs: InputBatch, shape: tuple[int, int]
    ) -> PassOutput:
        """`inputs` is that of the batch and its padding, `shape` the slots and the capacity of the caches."""
        width = inputs.token_ids.shape[1]
        rows = self._alike([*batch, *padding], width)
        drafting = self._forward.drafting(rows)
        sampling = SamplingBatch.of(
            [*batch, *padding], drafting, width, self._forward.vocab_size, merged=True
        )
        end = min(shape[1], rounded_up(last_cell(batch), CELL_STEP, CELL_PARTS))
        key = _key(rows, inputs, sampling, end, shape)
        known = self._traces.get(key)
        traced = known or self._trace(rows, sampling.without_arrays(), end, shape[1])
        found, arrays = traced([inputs.arrays, sampling.arrays], self._arrays())
        self._put(arrays)
        self._keep(key, traced)
        return _pass_output(batch, len(rows), drafting, found, sampling.logprobs is not None, known is None)

    def _keep(self, key: Hashable, traced: Traced) -> None:
        """One that has run; those that were not used for longest go."""
        self._traces[key] = traced
        self._traces.move_to_end(key)
        if len(self._traces) > MOST_TRACES:
            self._traces.popitem(last=False)

    def _alike(self, batch: Batch, width: int) -> Batch:
        """The rows as a trace sees them: without what arrays say, so that few traces do for many batches.

        All feed, draft and pick as much as there is room for: how much each really does is in the inputs. The
        head passes over all of them where it follows some: what it is fed is `InputBatch.head_fed`.
        """
        any_head, any_deferred = any(row.feeds_head for row in batch), any(row.defers_head for row in batch)
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
                defers_head=any_deferred,
            )
            for row in batch
        ]

    def _trace(self, batch: Batch, sampling: SamplingBatch, end: int, capacity: int) -> Traced:
        def run(
            inputs: list[Any], caches: list[list[mx.array]]
        ) -> tuple[list[mx.array], list[list[mx.array]]]:
            fed, numbers = inputs
            self._put(caches)
            with nothing_launched():
                output = self._forward.run(
                    batch, InputBatch(*fed), sampling.with_arrays(numbers), end, capacity
                )
            return _outputs(output), self._arrays()

        return mx.compile(run)

    def _buffers(self) -> list[Buffers]:
        return list(self._forward.buffers())

    def _arrays(self) -> list[list[mx.array]]:
        return [list(buffers.arrays()) for buffers in self._buffers()]

    def _put(self, arrays: Sequence[Sequence[mx.array]]) -> None:
        for buffers, own in zip(self._buffers(), arrays, strict=True):
            buffers.put(own)


def _key(
    batch: Batch, inputs: InputBatch, sampling: SamplingBatch, end: int, shape: tuple[int, int]
) -> Hashable:
    return (
        inputs.token_ids.shape,
        end,
        shape,
        sampling.key,
        inputs.deltas is None,
        tuple((row.slot, row.feeds_head, row.defers_head) for row in batch),
        max((row.num_drafts_next for row in batch if row.feeds_head), default=0),
    )


def _outputs(output: PassOutput) -> list[mx.array]:
    picks, next_inputs = output.picks, output.next_inputs
    assert picks is not None and next_inputs is not None
    found = [
        picks.targets,
        picks.num_accepted,
        picks.is_sound,
        output.report,
        next_inputs.last_ids,
        next_inputs.ends,
    ]
    if picks.logprobs is not None:
        found += picks.logprobs.arrays
    if output.drafts is not None:
        assert next_inputs.drafts is not None
        found += [output.drafts, next_inputs.drafts]
    return found


def _pass_output(
    batch: Batch,
    num_rows: int,
    drafting: list[int],
    found: Sequence[mx.array],
    has_logprobs: bool,
    is_traced: bool,
) -> PassOutput:
    """From what `_outputs` gave."""
    targets, num_accepted, is_sound, report, last_ids, ends, *more = found
    logprobs = None
    if has_logprobs:
        logprobs = LogprobArrays(tuple(range(num_rows)), *more[:3])
        more = more[3:]
    drafts, spread = more or (None, None)
    picks = Picks(list(range(num_rows)), targets, num_accepted, is_sound, logprobs)
    return PassOutput(batch, picks, drafting, drafts, NextInputs(last_ids, ends, spread), report, is_traced)
