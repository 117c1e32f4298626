"""A head that may be paused, and the hidden states of cells that the head was not fed yet.

While a row decodes without drafts, its head may be paused. When the head is needed again, one pass feeds it
everything that it has missed:

    cells   0 .......... head_start-1 | head_start ... start-1 | start ... start+fed-1
    head    has been fed              | stored here            | computed in this step
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from outrider.cache.hidden_cells import HiddenCells
from outrider.cache.placement import Placement
from outrider.cache.ragged_kv import RaggedKV
from outrider.cpu.cells import native_write_cells
from outrider.models.divided_output import DividedOutput
from outrider.models.heads import LoadedHead
from outrider.models.trunk import Buffers, Trunk
from outrider.step.batch import Batch, catch_up_width, lags_of
from outrider.step.head_rows import Drafts, HeadRows
from outrider.step.mtp import MTPDrafter
from outrider.step.ranks import Ranks


@dataclass(frozen=True)
class FollowedRows:
    """The rows of a pass that a drafter follows, and what the trunk has made of them."""

    batch: Batch
    token_ids: mx.array  # [rows, width] fed to the trunk
    hidden: mx.array  # [rows, width, H] the trunk's, after these tokens
    # [rows, width] the token after each: sampled, a draft, or of the prompt. Other ranks than 0: anything.
    next_ids: mx.array
    rows: HeadRows


class PausableHead:
    """An MTP head with what it has missed: see step/device_drafter.py."""

    def __init__(
        self,
        head: LoadedHead,
        trunk: Trunk,
        ranks: Ranks | None = None,
        divided_output: DividedOutput | None = None,
    ) -> None:
        """`ranks`, `divided_output`: see MTPDrafter."""
        self._drafter = MTPDrafter(head, trunk, ranks, divided_output)
        self._missed = DeferredHeadInputs(trunk)
        self._ranks = ranks

    @property
    def may_run_on_all_rows(self) -> bool:
        return self._drafter.num_layers == 1

    def buffers(self) -> Iterator[Buffers]:
        yield from self._drafter.buffers()
        yield self._missed.kv

    def defer(self, hidden: mx.array, place: Placement) -> None:
        self._missed.store(hidden, place)

    def draft(self, followed: FollowedRows, capacity: int) -> Drafts | None:
        hidden, rows = self._missed.catch_up(followed.batch, followed.hidden, followed.rows, capacity)
        return self._drafter.draft(hidden, self._next_ids(followed, hidden.shape[1]), rows, capacity)

    def _next_ids(self, followed: FollowedRows, width: int) -> mx.array:
        """The token after each cell that the head is fed now, the missed ones included.  [rows, width]"""
        next_ids, is_first = followed.next_ids, self._ranks is None or self._ranks.rank == 0
        if is_first and lags_of(followed.batch).any():
            next_ids = with_missed_tokens(followed.batch, next_ids, width, offset=1)
        if self._ranks is None:
            return next_ids
        if not is_first:
            next_ids = mx.zeros((len(followed.batch), width), mx.int32)
        return self._ranks.launched_from_first(next_ids)


class DeferredHeadInputs:
    def __init__(self, trunk: Trunk) -> None:
        self._cells = HiddenCells(trunk.hidden_size, trunk.dtype, trunk.kv_bits, native_write_cells())

    @property
    def kv(self) -> RaggedKV:
        return self._cells.kv

    def store(self, hidden: mx.array, place: Placement) -> None:
        """Write hidden states [rows, width, H] to the cells that the trunk wrote."""
        self._cells.write(hidden, place)

    def catch_up(
        self, rows: Batch, hidden: mx.array, head_rows: HeadRows, capacity: int
    ) -> tuple[mx.array, HeadRows]:
        """Prepend what each row's head has missed to what it is fed now. Unchanged if nothing was missed."""
        head_lag = lags_of(rows)
        if not head_lag.any():
            return hidden, head_rows
        width = hidden.shape[1]
        self.store(hidden, head_rows.place(head_rows.starts, head_rows.num_fed, width, capacity))
        missed = mx.array(head_lag)
        wide = catch_up_width(head_lag, width)
        whole = replace(
            head_rows,
            starts=head_rows.starts - missed,
            num_fed=head_rows.num_fed + missed,
            num_committed=head_rows.num_committed + missed,
            images=None if head_rows.images is None else head_rows.images.moved(missed),
        )
        place = whole.place(whole.starts, whole.num_fed, wide, capacity)
        return self._cells.read(place), whole


def with_missed_tokens(rows: Batch, newest: mx.array, wide: int, offset: int) -> mx.array:
    """Prepend to each row of `newest` the tokens of the cells that it has missed.  [rows, wide]

    `newest` [rows, width] begins with the token `offset` places after the row's start.
    """
    head_lag, width = lags_of(rows), newest.shape[1]
    missed_ids = np.zeros((len(rows), wide), np.int32)
    for i, row in enumerate(rows):
        missed_ids[i, : head_lag[i]] = row.history[row.start - head_lag[i] + offset : row.start + offset]
    columns = np.arange(wide) - head_lag[:, None]  # columns of `newest`; negative: a missed cell
    shifted = mx.take_along_axis(newest, mx.array(np.clip(columns, 0, width - 1)), axis=1)
    return mx.where(mx.array(columns < 0), mx.array(missed_ids), shifted)
