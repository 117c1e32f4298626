"""Decode passes that are traced once for each shape and replayed, so that the host builds no graph.

Batches with the same key share a trace. The key is everything about the rows that is not passed in as an
array. Passes that prefill are not traced.

Padding rows make a batch as large as one that was traced already. They take the slots after the batch's own
rows, feed nothing, and their targets are not read. The cells of a sequence in such a slot do not change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import mlx.core as mx

from outrider.cache.placement import num_cells_of
from outrider.models.adapters.store import TracedArrays
from outrider.plan import RowPlan
from outrider.request import SamplingParams
from outrider.sampling.logprobs import LogprobArrays
from outrider.speculate.shapes import CELL_PARTS, CELL_STEP, rounded_up
from outrider.step.batch import Batch, InputBatch, NextInputs, PassOutput
from outrider.step.forward import Forward, end_of
from outrider.step.head_rows import Drafts
from outrider.step.verify import SamplingBatch, VerifyOutput

PADDING_ID = -1  # the sequence id of padding rows
NEUTRAL_PARAMS = SamplingParams(temperature=0)  # of a traced row: the real ones are in the SamplingBatch
MAX_TRACES = 128  # then the least recently used one is dropped; chosen by hand: a busy server has a few dozen

NO_ADAPTERS = TracedArrays({})

Tree = dict[str, Any]  # named arrays, nested
CacheArrays = list[list[mx.array]]  # of each cache buffer
Traced = Callable[[Tree, CacheArrays], tuple[Tree, CacheArrays]]


def is_traceable(batch: Batch) -> bool:
    """Whether all rows decode, in the first slots, so that the same shape will come again.

    Other batches prefill, feed a head what it has missed, or run one row alone after a failed step. Functions
    of the user (logits_processors) must be called in every pass.
    """
    return [row.slot for row in batch] == list(range(len(batch))) and all(
        row.is_sampling
        and row.start > 0
        and row.first_target == 0
        and row.media is None
        and row.positions is None
        and not row.params.logits_processors
        and not (row.feeds_head and row.head_lag)
        for row in batch
    )


def padding_rows(batch: Batch, num_rows: int) -> Batch:
    """Rows that bring a batch in the first slots up to num_rows."""
    return [
        RowPlan(
            sequence_id=PADDING_ID,
            slot=slot,
            start=1,  # 0 would mean a new row
            token_ids=(),
            num_drafts=0,
            next_id=None,
            feeds_head=False,
            num_drafts_next=0,
            params=batch[-1].params,  # the kind of a row that is there: no new group for the sampler
            history=(),
            num_prompt=0,
        )
        for slot in range(len(batch), num_rows)
    ]


def num_table_columns(batch: Batch, block_size: int | None) -> int:
    """Columns of the tables of a pass: rounded up, so that the same shapes come again."""
    if block_size is None:
        return 0
    num_cells = block_size * max(len(row.blocks) for row in batch)
    return 1 + rounded_up(num_cells, CELL_STEP, CELL_PARTS) // block_size


class CompiledPasses:
    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._traces: OrderedDict[Hashable, Traced] = OrderedDict()

    @property
    def num_traces(self) -> int:
        return len(self._traces)

    def __call__(
        self, batch: Batch, padding: Batch, inputs: InputBatch, num_slots: int, capacity: int
    ) -> PassOutput:
        """`inputs` are those of the batch and its padding rows."""
        if inputs.tables is not None:
            capacity = num_cells_of(inputs.tables, self._forward.block_size)
        width = inputs.token_ids.shape[1]
        rows = self._without_data([*batch, *padding], width)
        drafting = self._forward.drafting_rows(rows)
        sampling = SamplingBatch.of(
            [*batch, *padding], drafting, width, self._forward.vocab_size, for_trace=True
        )
        end = min(capacity, rounded_up(end_of(batch), CELL_STEP, CELL_PARTS))
        adapters = NO_ADAPTERS if inputs.adapters is None else self._forward.adapter_arrays
        key = (
            inputs.token_ids.shape,
            end,
            num_slots,
            capacity,
            sampling.key,
            inputs.position_deltas is None,
            None if inputs.tables is None else (inputs.tables.shape, self._num_blocks()),
            tuple((row.slot, row.feeds_head, row.defers_head) for row in rows),
            max((row.num_drafts_next for row in rows if row.feeds_head), default=0),
            inputs.adapters is None,
            adapters.shapes,
        )
        known = self._traces.get(key)
        traced = known or self._trace(rows, sampling.without_arrays(), end, capacity)
        given: Tree = {"inputs": inputs.arrays, "sampling": sampling.arrays, "adapters": adapters.arrays}
        arrays, caches = traced(given, self._cache_arrays())
        self._put_cache_arrays(caches)
        self._traces[key] = traced  # only now: a trace that fails is not stored
        self._traces.move_to_end(key)
        if len(self._traces) > MAX_TRACES:
            self._traces.popitem(last=False)
        return _from_arrays(batch, len(rows), drafting, arrays, is_first_trace=known is None)

    def _without_data(self, batch: Batch, width: int) -> Batch:
        """The rows for a trace: without all values that arrays hold, so that few traces serve many batches.

        In the trace every row feeds `width` tokens, all but the first of them drafts; `InputBatch` has the
        real numbers. If the head follows one row it runs over all; `InputBatch.head_fed` says which rows it
        is fed.
        """
        any_head, any_deferred = any(row.feeds_head for row in batch), any(row.defers_head for row in batch)
        on_all = self._forward.head_may_run_on_all_rows
        return [
            replace(
                row,
                token_ids=(0,) * width,
                num_drafts=width - 1,
                params=NEUTRAL_PARAMS,
                history=(),
                banned_ids=(),
                masks=None,
                position_delta=0,
                blocks=(),
                adapter=0,
                head_start=None,
                feeds_head=any_head if on_all else row.feeds_head,
                defers_head=any_deferred,
            )
            for row in batch
        ]

    def _trace(self, batch: Batch, sampling: SamplingBatch, end: int, capacity: int) -> Traced:
        def run(arrays: Tree, caches: CacheArrays) -> tuple[Tree, CacheArrays]:
            self._put_cache_arrays(caches)
            inputs, own_sampling = InputBatch(**arrays["inputs"]), sampling.with_arrays(arrays["sampling"])
            adapters = arrays["adapters"]
            output = self._forward.run(batch, inputs, own_sampling, end, capacity, adapter_arrays=adapters)
            return _to_arrays(output), self._cache_arrays()

        return mx.compile(run)

    def _num_blocks(self) -> int:
        return max(buffers.arrays()[0].shape[0] for buffers in self._forward.buffers())

    def _cache_arrays(self) -> CacheArrays:
        return [list(buffers.arrays()) for buffers in self._forward.buffers()]

    def _put_cache_arrays(self, arrays: CacheArrays) -> None:
        for buffers, own in zip(self._forward.buffers(), arrays, strict=True):
            buffers.put(own)


def _to_arrays(output: PassOutput) -> Tree:
    verified, next_inputs = output.verified, output.next_inputs
    assert verified is not None and next_inputs is not None
    arrays: Tree = {
        "targets": verified.targets,
        "num_accepted": verified.num_accepted,
        "statuses": verified.statuses,
        "report": output.report,
        "last_ids": next_inputs.last_ids,
        "ends": next_inputs.ends,
    }
    if verified.logprobs is not None:
        arrays["logprobs"] = verified.logprobs.arrays
    if output.drafts is not None:
        arrays |= {"drafts": output.drafts.token_ids, "drafts_of_all": next_inputs.drafts}
    return arrays


def _from_arrays(
    batch: Batch, num_rows: int, drafting: list[int], arrays: Tree, is_first_trace: bool
) -> PassOutput:
    rows = range(num_rows)
    logprobs = LogprobArrays(tuple(rows), **arrays["logprobs"]) if "logprobs" in arrays else None
    verified = VerifyOutput(
        list(rows), arrays["targets"], arrays["num_accepted"], arrays["statuses"], logprobs
    )
    next_inputs = NextInputs(arrays["last_ids"], arrays["ends"], arrays.get("drafts_of_all"))
    drafts = Drafts(arrays["drafts"]) if "drafts" in arrays else None
    return PassOutput(batch, verified, drafting, drafts, next_inputs, arrays["report"], {}, is_first_trace)
