"""The MTP drafter: feeds the head the committed pairs, then lets it draft token after token.

The head's cells run parallel to the trunk's. With tokens x_0.. and a layer for each of D depths, cell t holds

    depth 1   (h_t, x_(t+1))                      guesses x_(t+2)
    depth d   (depth d-1's output at t, x_(t+d))   guesses x_(t+d+1)     (unchained heads: h_t again)

A row with `end` cells knows x_0..x_end, so depth d's last d-1 cells hold drafts in the place of tokens. They
are written again by the next pass, which starts d-1 cells before the trunk's start:

    cells    0 ...... start-d | start-d+1 ... start-1 | start ............ end-1
    depth d  final            | written again         | new; the last d-1 tentative

Of the last layer only the newest column's output is read. A wide pass, as after a prompt or a pause, writes
its cells without computing the rest, and the newest column runs once more by itself.

Their inputs (the outputs of depth d-1, or h) are stored in cells of their own, so there is no state beside
the cells. Depths past the last layer use the last layer again: it is fed its own output, one cell further on,
as one-layer heads are at every depth. Those cells are tentative too.

On CPUs a head of one quantised layer does all of this in one native operation (cpu/draft_head.py), to the bit
alike. Its drafts are compared with those of the operations here before it is used.

A divided head (models/heads/division.py) runs on all ranks. Each has its part of the cells. Rank 0 samples,
and sends each draft that the head is fed next. All ranks launch their operations in the same order, where
they are built: the outputs of `fc`, the logits, the drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mlx.core as mx

from outrider.cache.hidden_cells import HiddenCells
from outrider.cache.placement import GridPositions, Placement
from outrider.cache.ragged_kv import RaggedKV
from outrider.cpu.cells import native_write_cells
from outrider.models.divided_output import DividedOutput
from outrider.models.gap_rope import GapRope
from outrider.models.heads import LoadedHead, divided_draft_projection, draft_projection, head_layout
from outrider.models.trunk import Buffers, Trunk, TrunkCache
from outrider.models.vision.mrope import MRope
from outrider.step.head_rows import Drafts, HeadRows
from outrider.step.native_head import NativeHead, native_head_of
from outrider.step.ranks import Ranks

# Columns of a pass, of all rows, from which it only writes the last layer's cells. On two CPU cores 8 gain
# nothing, 16 a tenth of the head's pass.
MIN_WIDE = 16


class MTPDrafter:
    """A loaded head with its caches. It drafts for all rows of a pass at once."""

    def __init__(
        self,
        head: LoadedHead,
        trunk: Trunk,
        ranks: Ranks | None = None,
        divided_output: DividedOutput | None = None,
    ) -> None:
        """`ranks`: that a divided head runs on. All of them make its drafter at the same time.

        `divided_output`: the trunk's, if there is one already.
        """
        if head.is_divided != (ranks is not None):
            raise ValueError("a divided head needs its ranks, and no other head does")
        self._ranks = ranks
        self._layers = head.layers
        self._caches = [TrunkCache([head_layout(layer, trunk)]) for layer in head.layers]
        self._is_chained = head.spec.is_chained
        num_between = len(head.layers) - 1
        self._between = [
            HiddenCells(trunk.hidden_size, trunk.dtype, trunk.kv_bits, native_write_cells())
            for _ in range(num_between if self._is_chained else 1)
        ]
        self._takes_grids = any(isinstance(m, MRope | GapRope) for h in head.layers for m in h.modules())
        self._trunk = trunk
        self._draft_ids = head.draft_ids
        self._project: Callable[[mx.array], mx.array] = trunk.logits
        if head.draft_ids is not None and ranks is not None:
            self._project = divided_draft_projection(trunk, head.draft_ids, ranks.group)
        elif head.draft_ids is not None:
            self._project = draft_projection(trunk, head.draft_ids)
        elif ranks is not None:
            self._project = divided_output or DividedOutput(trunk, ranks.group)
        self._native: NativeHead | None = None
        if ranks is None and len(head.layers) == 1:
            self._native = self._native_head(head)

    def _native_head(self, head: LoadedHead) -> NativeHead | None:
        kv = self._caches[0].layers[0]
        if not isinstance(kv, RaggedKV):
            return None  # several caches
        projection = self._project if head.draft_ids is not None else self._trunk.output
        return native_head_of(self, head, self._trunk, projection, kv)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def buffers(self) -> Iterator[Buffers]:
        for cache in self._caches:
            yield from cache.buffers()
        if len(self._layers) > 1:
            yield from (cells.kv for cells in self._between)

    def draft(self, hidden: mx.array, next_ids: mx.array, rows: HeadRows, capacity: int) -> Drafts | None:
        """Feed the pairs (hidden [rows, width, H], next_ids [rows, width]); return drafts, if any are wanted.

        Pairs past a row's num_committed may be written too, as tentative cells that no later pass attends to.
        """
        if self._native is not None and self._native.can_draft(hidden, rows):
            return self._native.draft(hidden, next_ids, rows)
        width = next_ids.shape[1]
        ends = rows.starts + rows.num_committed  # [rows] cells after the step
        beyond = mx.split(ends[:, None] + mx.arange(rows.depth + 1), rows.depth + 1, axis=1)  # [rows, 1] each
        tokens = _Tokens(next_ids, rows, len(self._layers), self._trunk, self._on_all_ranks)
        is_known = self._takes_grids or not isinstance(rows.positions, GridPositions)
        one_if_fed = mx.minimum(rows.num_fed, 1)
        drafts: list[mx.array] = []
        margins: list[mx.array] = []
        fed_back = hidden
        for number in range(len(self._layers)):
            if number == 0:
                positions = rows.positions if is_known else None
                place = rows.place(rows.starts, rows.num_fed, width, capacity, positions)
            else:
                place = _placed_back(rows, number, len(drafts), width, capacity)
                hidden = self._between[number - 1 if self._is_chained else 0].read(place)
            x = self._through_fc(number, hidden, tokens.at(place, number))
            is_last, is_read = number == len(self._layers) - 1, number < rows.depth
            place.only_cells = is_last and (not is_read or self._is_wide(x))
            out, fed_back = self._block(number, x, place)
            self._store(number, hidden, fed_back, place)
            if not is_read:
                continue
            newest = (ends - 1 - place.starts)[:, None, None]
            if place.only_cells:
                cells = ends - 1
                positions = rows.after(cells) if number > 0 or is_known else None
                place = rows.place(cells, one_if_fed, 1, capacity, positions)
                out, fed_back = self._block(number, mx.take_along_axis(x, newest, axis=1), place)
            else:
                out, fed_back = (mx.take_along_axis(each, newest, axis=1) for each in (out, fed_back))
            rows.sample(self._logits(out), beyond[len(drafts) + 1], self._draft_ids, drafts, margins)
            if not is_last:
                tokens.append(self._on_all_ranks(drafts[-1]))
        for further in range(rows.depth - len(drafts)):
            cells = beyond[further][:, 0]
            place = rows.place(cells, one_if_fed, 1, capacity, rows.after(cells), further + 1)
            embedded = self._trunk.embed(self._on_all_ranks(drafts[-1]))
            out, fed_back = self._block(-1, self._through_fc(-1, fed_back, embedded), place)
            rows.sample(self._logits(out), beyond[len(drafts) + 1], self._draft_ids, drafts, margins)
        if not drafts:
            return None
        return Drafts(
            mx.concatenate(drafts, axis=1), mx.concatenate(margins, axis=1) if rows.with_margins else None
        )

    def _through_fc(self, number: int, hidden: mx.array, embedded: mx.array) -> mx.array:
        x = self._layers[number].through_fc(hidden, embedded)
        if self._ranks is not None:
            mx.async_eval(x)
        return x

    def _block(self, number: int, x: mx.array, place: Placement) -> tuple[mx.array, mx.array]:
        return self._layers[number].after_fc(x, self._caches[number].views(place)[0])

    def _is_wide(self, x: mx.array) -> bool:
        """Whether it pays to compute the newest column by itself. (Ranks would wait for each other twice.)"""
        return self._ranks is None and x.shape[0] * x.shape[1] >= MIN_WIDE

    def _store(self, number: int, hidden: mx.array, fed_back: mx.array, place: Placement) -> None:
        """Store what the next layer is fed at these cells, in this pass and in the next one."""
        if number == len(self._layers) - 1:
            return
        if self._is_chained:
            self._between[number].write(fed_back, place)
        elif number == 0:
            self._between[0].write(hidden, place)

    def _logits(self, out: mx.array) -> mx.array:
        """Of the draft vocabulary."""
        logits = self._project(out).astype(mx.float32)
        if self._ranks is not None:
            mx.async_eval(logits)
        return logits

    def _on_all_ranks(self, array: mx.array) -> mx.array:
        """Rank 0's array. The other ranks of a divided head give one of the same shape and kind."""
        if self._ranks is None:
            return array
        return self._ranks.launched_from_first(array)


def _placed_back(rows: HeadRows, lag: int, num_drafts: int, width: int, capacity: int) -> Placement:
    """The cells of the layer of depth lag + 1: from `lag` before the trunk's to the last known token."""
    firsts = mx.maximum(rows.starts - lag, 0)
    lasts = rows.starts + rows.num_committed - (lag - num_drafts)
    positions = rows.after(firsts)  # inside an image only approximate: this affects drafts, never the answer
    return rows.place(firsts, lasts - firsts, width + lag, capacity, positions)


class _Tokens:
    """The tokens from each row's start + 1 on: committed tokens, then drafts.

    Columns past them hold rejected tokens or padding. No committed cell is paired with one of these.
    """

    def __init__(
        self,
        next_ids: mx.array,
        rows: HeadRows,
        num_layers: int,
        trunk: Trunk,
        on_all_ranks: Callable[[mx.array], mx.array],
    ) -> None:
        self._trunk = trunk
        self._images, self._has_images = rows.images, rows.has_images or rows.images is not None
        self._on_all_ranks = on_all_ranks
        self._ids = mx.pad(next_ids, [(0, 0), (0, num_layers - 1)]) if num_layers > 1 else next_ids
        self._starts = rows.starts[:, None]
        self._num = rows.num_committed[:, None]

    def at(self, place: Placement, lag: int) -> mx.array:
        """For the cells t of a placement the embedded tokens x_(t + lag + 1).  [rows, width, H]"""
        columns = mx.minimum(place.cells + lag - self._starts, self._ids.shape[1] - 1)
        if self._has_images:
            embedded = self._trunk.embed(self._ids)
            if self._images is not None:
                embedded = self._images.put_into(embedded)
            return mx.take_along_axis(self._on_all_ranks(embedded), columns[..., None], axis=1)
        if lag == 0:
            return self._trunk.embed(self._ids[:, : place.cells.shape[1]])
        return self._trunk.embed(mx.take_along_axis(self._ids, columns, axis=1))

    def append(self, drafts: mx.array) -> None:
        """One more for every row.  [rows, 1]"""
        self._ids = mx.put_along_axis(self._ids, self._num, drafts.astype(self._ids.dtype), axis=1)
        self._num = self._num + 1
