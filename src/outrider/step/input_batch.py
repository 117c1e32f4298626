"""What a batch is fed, as arrays. Whether the host knows their values does not matter to what follows.

`of_rows` makes them from a plan, `after` from what a pass leaves behind, before the host has read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from outrider.plan import RowPlan
from outrider.step.images import deltas_of

Batch = Sequence[RowPlan]


@dataclass(frozen=True)
class InputBatch:
    """The tokens of every row and where they go."""

    token_ids: mx.array  # [rows, width] committed tokens, drafts, padding
    starts: mx.array  # [rows]
    num_fed: mx.array  # [rows]
    num_drafts: mx.array  # [rows] how many of those, at the end, are drafts
    head_fed: mx.array  # [rows] for how many of them the head is fed their pairs: all or none
    deltas: mx.array | None = None  # [rows] from cells' numbers to positions, where rows have such

    @classmethod
    def of_rows(cls, batch: Batch, width: int) -> InputBatch:
        token_ids = np.zeros((len(batch), width), np.int32)
        for i, row in enumerate(batch):
            token_ids[i, : row.num_fed] = row.token_ids
        return cls(mx.array(token_ids), mx.array([row.start for row in batch]), *_of_plan(batch))

    @classmethod
    def after(cls, next_inputs: NextInputs, batch: Batch, width: int) -> InputBatch:
        """For the same rows' next pass: the token that each has just picked, then its drafts.

        Rows of one of the two that the other lacks are at the end, and inputs nothing.
        """
        columns = [next_inputs.last_ids[:, None]]
        if next_inputs.drafts is not None:
            columns.append(next_inputs.drafts[:, : width - 1])
        num_more = width - sum(part.shape[1] for part in columns)
        if num_more > 0:
            columns.append(mx.zeros((columns[0].shape[0], num_more), mx.int32))
        token_ids, starts = mx.concatenate(columns, axis=1), next_inputs.ends
        if (num := len(batch)) > starts.shape[0]:
            more = num - starts.shape[0]
            token_ids, starts = mx.pad(token_ids, [(0, more), (0, 0)]), mx.pad(starts, (0, more))
        return cls(token_ids[:num], starts[:num], *_of_plan(batch))

    @property
    def arrays(self) -> list[mx.array]:
        known = [self.token_ids, self.starts, self.num_fed, self.num_drafts, self.head_fed]
        return known if self.deltas is None else [*known, self.deltas]


@dataclass(frozen=True)
class NextInputs:
    """What a pass over rows that all pick leaves for their next one. Padding rows are undefined."""

    last_ids: mx.array  # [rows] the last token that each has picked
    ends: mx.array  # [rows] cells that stand
    drafts: mx.array | None  # [rows, depth] for the next pass; anything for rows that asked for none


def _of_plan(batch: Batch) -> tuple[mx.array, mx.array, mx.array, mx.array | None]:
    """What is known of the rows before anything is read."""
    return (
        mx.array([row.num_fed for row in batch]),
        mx.array([row.num_drafts for row in batch]),
        mx.array([row.num_fed if row.feeds_head else 0 for row in batch]),
        deltas_of(batch),
    )
