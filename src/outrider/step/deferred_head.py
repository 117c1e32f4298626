"""What the head is to be fed later: the hidden states of cells that the trunk has and the head has not.

While a row is decoded without drafts its head may rest; when it is wanted again it catches up in one pass:

    cells   0 .......... head_start-1 | head_start ... start-1 | start ... start+fed-1
    head    has been fed              | kept here              | computed in this step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from outrider.cache.hidden_cells import HiddenCells
from outrider.cache.ragged_kv import Placement, RaggedKV
from outrider.models.trunk import Trunk
from outrider.plan import RowPlan
from outrider.step.images import positions_of
from outrider.step.mtp import HeadRows

WIDTH_STEP = 16  # cells by which a catching-up pass grows, so that shapes repeat


class DeferredHeadInputs:
    def __init__(self, trunk: Trunk) -> None:
        self._cells = HiddenCells(trunk.hidden_size, trunk.dtype)

    @property
    def kv(self) -> RaggedKV:
        return self._cells.kv

    def keep(self, hidden: mx.array, place: Placement) -> None:
        """[rows, width, H], in the cells that the trunk wrote."""
        self._cells.write(hidden, place)

    def catch_up(
        self, rows: Sequence[RowPlan], hidden: mx.array, next_ids: mx.array, drafting: HeadRows, capacity: int
    ) -> tuple[mx.array, mx.array, HeadRows]:
        """Put what each row's head has missed before what it is fed now; as given where it missed nothing."""
        behind = np.array([row.num_behind for row in rows], np.int32)
        if not behind.any():
            return hidden, next_ids, drafting
        width = next_ids.shape[1]
        now = Placement(drafting.slots, drafting.starts, drafting.num_fed, width, drafting.end, capacity)
        self.keep(hidden, now)
        missed = mx.array(behind)
        wide = -(-(int(behind.max()) + width) // WIDTH_STEP) * WIDTH_STEP
        whole = replace(
            drafting,
            starts=drafting.starts - missed,
            num_fed=drafting.num_fed + missed,
            num_kept=drafting.num_kept + missed,
            positions=positions_of(rows, drafting.starts - missed, wide, drafting.deltas, behind),
            images=None if drafting.images is None else drafting.images.moved(missed),
        )
        place = Placement(whole.slots, whole.starts, whole.num_fed, wide, whole.end, capacity)
        known = np.zeros((len(rows), wide), np.int32)
        for i, row in enumerate(rows):
            known[i, : behind[i]] = row.history[row.start - behind[i] + 1 : row.start + 1]
        columns = np.arange(wide) - behind[:, None]  # of what is fed now
        newest = mx.take_along_axis(next_ids, mx.array(np.clip(columns, 0, width - 1)), axis=1)
        return self._cells.read(place), mx.where(mx.array(columns < 0), mx.array(known), newest), whole
