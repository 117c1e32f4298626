"""Deferred head inputs: the hidden states of cells that the trunk has computed and the head was not fed yet.

While a row decodes without drafts, its head may be paused. When the head is needed again, one pass feeds it
everything that it has missed:

    cells   0 .......... head_start-1 | head_start ... start-1 | start ... start+fed-1
    head    has been fed              | stored here            | computed in this step
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np

from outrider.cache.hidden_cells import HiddenCells
from outrider.cache.placement import Placement
from outrider.cache.ragged_kv import RaggedKV
from outrider.models.trunk import Trunk
from outrider.step.batch import Batch, positions_of
from outrider.step.mtp import HeadRows

WIDTH_STEP = 16  # cells; the width of a catch-up pass is a multiple, so that shapes repeat; chosen by hand


class DeferredHeadInputs:
    def __init__(self, trunk: Trunk) -> None:
        self._cells = HiddenCells(trunk.hidden_size, trunk.dtype, trunk.kv_bits)

    @property
    def kv(self) -> RaggedKV:
        return self._cells.kv

    def store(self, hidden: mx.array, place: Placement) -> None:
        """Write hidden states [rows, width, H] to the cells that the trunk wrote."""
        self._cells.write(hidden, place)

    def catch_up(
        self, rows: Batch, hidden: mx.array, next_ids: mx.array, head_rows: HeadRows, capacity: int
    ) -> tuple[mx.array, mx.array, HeadRows]:
        """Prepend what each row's head has missed to what it is fed now. Unchanged if nothing was missed."""
        head_lag = np.array([row.head_lag for row in rows], np.int32)
        if not head_lag.any():
            return hidden, next_ids, head_rows
        width = next_ids.shape[1]
        self.store(hidden, head_rows.place(head_rows.starts, head_rows.num_fed, width, capacity))
        missed = mx.array(head_lag)
        wide = -(-(int(head_lag.max()) + width) // WIDTH_STEP) * WIDTH_STEP
        starts = head_rows.starts - missed
        whole = replace(
            head_rows,
            starts=starts,
            num_fed=head_rows.num_fed + missed,
            num_committed=head_rows.num_committed + missed,
            positions=positions_of(rows, starts, wide, head_rows.position_deltas, head_lag),
            images=None if head_rows.images is None else head_rows.images.moved(missed),
        )
        place = whole.place(whole.starts, whole.num_fed, wide, capacity)
        missed_ids = np.zeros((len(rows), wide), np.int32)
        for i, row in enumerate(rows):
            missed_ids[i, : head_lag[i]] = row.history[row.start - head_lag[i] + 1 : row.start + 1]
        columns = np.arange(wide) - head_lag[:, None]  # columns of next_ids; negative: a missed cell
        newest = mx.take_along_axis(next_ids, mx.array(np.clip(columns, 0, width - 1)), axis=1)
        next_ids = mx.where(mx.array(columns < 0), mx.array(missed_ids), newest)
        return self._cells.read(place), next_ids, whole
