"""The context of one forward pass: the places of its rows in the cache buffers, and what its layers share.

The step builds one `Placement` for each pass and hands it to the cache views. mlx-lm's layers are called with
those views, so every layer of the pass reaches the same object. Nothing of a pass is stored anywhere else.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import mlx.core as mx

from outrider.plan import BLOCK_SIZE, JUNK_BLOCK, MANY_TOKENS, ZEROS_BLOCK

VIEW_STEP = 16  # cells; the attended part of a buffer is a multiple, so that shapes repeat; chosen by hand
LONG_VIEW = 256  # cells; longer views are multiples of LONG_VIEW_STEP instead; chosen by hand
LONG_VIEW_STEP = 32  # OpenBLAS may round differently with its thread count unless a size is a multiple of 32
LAUNCH_EVERY_LAYERS = 2  # layers that the host builds before it launches them; chosen by hand
# A wide pass waits for the device if more launches are not done: MLX on CUDA holds all that they use, and
# does not wait by itself. With the next launch, a wide pass holds what six layers use (`most_held`). Chosen
# by hand.
MAX_LAUNCHED = 2
# Rows attend together if the shortest of them has at least this share of the longest one's cells, or lacks
# only a few cells: a group of its own costs as much as to read these. Chosen by hand.
MIN_GROUP_SHARE = 0.8
MAX_GROUP_PADDING = 256


@dataclass(frozen=True)
class GridPositions:
    """Three positions for each token (time, row, column), for prompts with images: see vision/mrope.

    In a prompt of which tokens were skipped the three are equal: see models/gap_rope.py.
    """

    grid: mx.array  # int32 [3, rows, width]


Positions = mx.array | GridPositions  # one offset for each row [rows], or three positions for each token


class LowRankTerms(Protocol):
    """What the adapters add to the output of one linear layer."""

    def add(self, y: mx.array, x: mx.array, ids: mx.array) -> mx.array:
        """y [..., outputs] with the terms; x [..., inputs] is the layer's input, ids [rows] the adapters."""
        ...


@dataclass(frozen=True)
class RowAdapters:
    """The adapters of a pass's rows: see models/adapters/."""

    ids: mx.array  # int32 [rows]; 0: the row has none
    terms: Mapping[str, LowRankTerms]  # by the path of the layer in the model


class RopeOffsets(mx.array):
    """The rope offset of each row [rows], with the cosines and sines that all layers of the pass share.

    mlx-lm calls a rope with `cache.offset` and nothing else, so what ropes share has to travel with the
    offset. cpu/fast_math.py uses `angles`; for all other code this is a plain array.
    """

    def __init__(self, offsets: mx.array) -> None:
        super().__init__(offsets)
        self.angles: dict[Hashable, tuple[mx.array, mx.array]] = {}  # by width and by the rope's parameters


class CommitCounts:
    """How many tokens of a pass each row commits, and the indices that recurrent layers derive from that."""

    def __init__(self, num: mx.array) -> None:
        self.num = num  # [rows]
        self._columns: dict[int, mx.array] = {}

    def columns(self, num: int) -> mx.array:
        """The `num` columns that start at each row's first uncommitted token.  [rows, num, 1]"""
        if num not in self._columns:
            self._columns[num] = (self.num[:, None] + mx.arange(num))[..., None]
        return self._columns[num]

    def wait_for(self, arrays: list[mx.array]) -> None:
        """Make everything that is computed from these counts later depend on `arrays`.

        The new states of the layers are then computed one after the other. Side by side they would need
        memory for all layers at once.
        """
        num, *columns = mx.depends([self.num, *self._columns.values()], arrays)
        self.num, self._columns = num, dict(zip(self._columns, columns, strict=True))


def block_tables(blocks: Sequence[Sequence[int]], num_columns: int = 0) -> mx.array:
    """The blocks of every row, as `Placement` takes them.  [rows, most blocks + 1]

    The columns behind a row's own blocks hold ZEROS_BLOCK; each row has at least one such column.
    """
    num_columns = max(num_columns, 1 + max(len(own) for own in blocks))
    return mx.array([[*own, *[ZEROS_BLOCK] * (num_columns - len(own))] for own in blocks])


def num_cells_of(tables: mx.array, block_size: int) -> int:
    """The most cells that a row of these tables can have."""
    return (tables.shape[1] - 1) * block_size


@dataclass(frozen=True)
class RowGroup:
    """Rows of about the same length, which attend together."""

    rows: mx.array  # indices into the pass's rows
    place: Placement  # of these rows


class Placement:
    """The places of one pass's rows in the buffers. All layers of the pass share it.

    Starts and fed counts may be device arrays that the host has not read. The host only needs `end`: no row's
    last fed cell lies beyond it. If it knows that of each row (`ends`), long and short rows attend in groups.

    Cells are in slots of `capacity` cells, or in blocks. For blocks there are `tables` (`block_tables`).
    """

    def __init__(
        self,
        slots: Sequence[int],
        starts: mx.array,
        num_fed: mx.array,
        width: int,
        end: int,
        capacity: int,
        any_new: bool = True,
        positions: Positions | None = None,
        commits_all: bool = False,
        deepstack: Sequence[mx.array] = (),
        launches: bool = False,
        tables: mx.array | None = None,
        block_size: int = BLOCK_SIZE,
        ends: Sequence[int] | None = None,
        span: tuple[int, int] | None = None,
        adapters: RowAdapters | None = None,
        only_cells: bool = False,
    ) -> None:
        if tables is not None:
            capacity = num_cells_of(tables, block_size)
        if end > capacity:
            raise ValueError(f"a row would need {end} cells where the buffers have {capacity}")
        self.starts = starts  # [rows]
        self.num_fed = num_fed  # [rows]
        self.fed_counts = CommitCounts(num_fed)  # what recurrent layers commit where `commits_all`
        self.any_new = any_new  # True if a row may start at 0 in a slot that holds another sequence's state
        self.commits_all = commits_all  # True if no row has drafts, so that all fed tokens are committed
        self.deepstack = deepstack  # [rows, width, hidden] for each of the first layers: see vision/deepstack
        self.launches = launches  # for long passes; a pass that is traced has nothing to run yet
        self.span = span  # first cell, and the one after the last, that all tokens of the one row attend to
        positions = starts if positions is None else positions
        self.positions = RopeOffsets(positions) if isinstance(positions, mx.array) else positions
        self.capacity = capacity
        self.tables = tables
        self.adapters = adapters  # None: no row has one
        self.only_cells = only_cells  # True if nobody reads the pass's output: MLX does not compute it then
        self._block_size = block_size
        self._ends = ends
        view_step = VIEW_STEP if end <= LONG_VIEW else LONG_VIEW_STEP
        if tables is not None:
            view_step = block_size
        self.num_attended = min(capacity, -(-end // view_step) * view_step)
        self.slots = slots
        self._width = width
        self.angles: dict[Hashable, mx.array] = {}  # cosines and sines, by rope: see cpu/fused_layers.py
        self._gathered: dict[int, mx.array] = {}
        self._written_in_blocks: dict[int, mx.array] = {}
        self._masks: dict[int | None, mx.array] = {}
        self._score_bounds: dict[int | None, mx.array] = {}
        self._added: dict[tuple[int, mx.Dtype], mx.array] = {}
        self._num_layers_written = 0
        self._launched: list[tuple[mx.array, ...]] = []  # of a wide pass; the device may not be done
        self.num_native = 0  # layers whose native attention has read each row's cells where they are
        # For cpu/layer_runs.py: the buffers of all layers, if the whole model is called; the run of layers
        # that was computed last, and its output.
        self.layer_buffers: Sequence[Any] = ()
        self.computed_run: tuple[object, mx.array | None] = (None, None)

    # -- cells (native layers compute them by themselves) ------------------------------------------------

    @cached_property
    def is_range(self) -> bool:
        """True if the slots follow each other: they are read without a copy."""
        return list(self.slots) == list(range(self.slots[0], self.slots[0] + len(self.slots)))

    @cached_property
    def slot_ids(self) -> mx.array:
        """[rows, 1]"""
        return mx.array(list(self.slots))[:, None]

    @cached_property
    def cells(self) -> mx.array:
        """[rows, width]"""
        return self.starts[:, None] + mx.arange(self._width)

    @cached_property
    def fed(self) -> mx.array:
        """True for tokens, False for padding.  [rows, width]"""
        return mx.arange(self._width) < self.num_fed[:, None]

    @cached_property
    def limit(self) -> mx.array:
        """The cell that takes the padding's writes.  [1]"""
        # An array: a number would be built into compiled kernels, which would then fit one capacity only.
        return mx.arange(self.capacity, self.capacity + 1)

    @cached_property
    def written(self) -> mx.array:
        """The cells that the pass writes.  [rows, width]"""
        own = mx.minimum(self.cells, self.limit)  # a row that drafts past its own depth may run over the end
        return mx.where(self.fed, own, self.limit)

    # -- blocks ------------------------------------------------------------------------------------------

    @property
    def has_blocks(self) -> bool:
        return self.tables is not None

    @property
    def places(self) -> mx.array:
        """The rows' blocks [rows, most blocks + 1], or their slots [rows, 1]."""
        return self.slot_ids if self.tables is None else self.tables

    def written_in_blocks(self, num_heads: int) -> mx.array:
        """The cell of each fed token, numbered block by block and head by head.  [rows, heads, width]"""
        assert self.tables is not None
        if num_heads not in self._written_in_blocks:
            blocks = mx.where(self.fed, self._blocks_of(self.cells), JUNK_BLOCK)
            blocks = mx.maximum(blocks, JUNK_BLOCK)[:, None]  # past a row's own blocks
            of_head = blocks * num_heads + mx.arange(num_heads)[:, None]
            cells = of_head * self._block_size + (self.cells % self._block_size)[:, None]
            self._written_in_blocks[num_heads] = cells
        return self._written_in_blocks[num_heads]

    @cached_property
    def read_blocks(self) -> tuple[mx.array, mx.array]:
        """The same for reading: ZEROS_BLOCK past a row's blocks."""
        return self._blocks_of(self.cells), self.cells % self._block_size

    def _blocks_of(self, cells: mx.array) -> mx.array:
        assert self.tables is not None
        columns = mx.minimum(cells // self._block_size, self.tables.shape[1] - 1)
        return mx.take_along_axis(self.tables, columns, axis=1)

    def gathered_blocks(self, num_heads: int) -> mx.array:
        """The rows' blocks up to `num_attended`, numbered head by head.  [rows, heads, blocks]"""
        assert self.tables is not None
        if num_heads not in self._gathered:
            own = self.tables[:, None, : self.num_attended // self._block_size]
            self._gathered[num_heads] = own * num_heads + mx.arange(num_heads)[:, None]
        return self._gathered[num_heads]

    # -- attention ---------------------------------------------------------------------------------------

    @cached_property
    def has_groups(self) -> bool:
        """True if the rows differ so much in length that attention pays by group."""
        return self._ends is not None and len(grouped_by_length(self._ends)) > 1

    @cached_property
    def groups(self) -> list[RowGroup]:
        """The rows by length; empty if all attend together."""
        if self._ends is None or not self.has_groups:
            return []
        return [self._group(rows) for rows in grouped_by_length(self._ends)]

    def _group(self, rows: Sequence[int]) -> RowGroup:
        assert self._ends is not None
        index = mx.array(list(rows))
        place = Placement(
            [self.slots[row] for row in rows],
            self.starts[index],
            self.num_fed[index],
            self._width,
            max(self._ends[row] for row in rows),
            self.capacity,
            tables=None if self.tables is None else self.tables[index],
            block_size=self._block_size,
        )
        return RowGroup(index, place)

    def mask(self, window: int | None) -> mx.array:
        """True where a fed token attends to a cell: its own row's, up to itself.  [rows, 1, width, cells]"""
        if window not in self._masks:
            attended = mx.arange(self.num_attended)
            own = self.cells[:, None, :, None]
            mask = attended <= own
            if window is not None:
                # Padding columns must attend to a cell too: attention over no cell is NaN on some devices.
                mask = mask & (attended > mx.minimum(own, attended[-1:]) - window)
            if self.span is not None:
                mask = mask | ((attended >= self.span[0]) & (attended < self.span[1]))
            self._masks[window] = mask
        return self._masks[window]

    def window_of(self, mask: object) -> int | None:
        """The window of a causal mask that `mask` made, 0 for none. None for another mask."""
        if self.span is not None:
            return None
        for window, own in self._masks.items():
            if own is mask:
                return window or 0
        return None

    def score_bound(self, mask: mx.array) -> mx.array:
        """The most that each attention score may be: infinity, or -infinity where `mask` hides the cell.

        The layers share the bound of a mask that `mask` made. A model may have changed its mask: then the
        bound is computed anew.
        """
        window = next((window for window, own in self._masks.items() if own is mask), -1)
        if window == -1:
            return mx.where(mask, mx.inf, -mx.inf)
        if window not in self._score_bounds:
            self._score_bounds[window] = mx.where(mask, mx.inf, -mx.inf)
        return self._score_bounds[window]

    def added_to_scores(self, mask: mx.array, dtype: mx.Dtype) -> mx.array | None:
        """0 where a mask that `mask` made lets a token attend, else -infinity; None for another mask.

        The layers share it.
        """
        window = self.window_of(mask)
        if window is None:
            return None
        if (window, dtype) not in self._added:
            self._added[window, dtype] = mx.where(mask, mx.array(0, dtype), mx.array(-mx.inf, dtype))
        return self._added[window, dtype]

    @cached_property
    def is_wide(self) -> bool:
        """True for a pass that must not run far ahead of the device: on CUDA, with many tokens."""
        return self.launches and bool(mx.cuda.is_available()) and len(self.slots) * self._width >= MANY_TOKENS

    def launch(self, *arrays: mx.array) -> None:
        """Let the device work on these arrays while the host builds the rest."""
        if self.launches:
            mx.async_eval(*arrays)

    def launch_every_few_layers(self, *arrays: mx.array) -> None:
        """Called when a layer has written its cells: the device works while the host builds the rest.

        Recurrent layers call it too, in wide passes.
        """
        self._num_layers_written += 1
        if not self.launches or self._num_layers_written % LAUNCH_EVERY_LAYERS:
            return
        mx.async_eval(*arrays)
        if self.is_wide:
            self._launched.append(arrays)
            if len(self._launched) > MAX_LAUNCHED:
                mx.eval(*self._launched.pop(0))


def most_held(by_layer: Sequence[int]) -> int:
    """The most bytes that a wide pass holds at once, if the device frees them only when a launch is done.

    `by_layer`: bytes that are used between two calls of `launch_every_few_layers`. The last entry is what
    follows the last call: it belongs to the launch at the end of the step. A launch is made before the pass
    waits, so with it MAX_LAUNCHED + 1 launches are not done:

        calls          1      2      3      4      5
        bytes       b0 |  b1  |  b2  |  b3  |  b4  |  b5
        launches    [-- 1 ----] [--- 2 -----] [--- end of the step
    """
    num_launches = (len(by_layer) - 1) // LAUNCH_EVERY_LAYERS
    ends = [LAUNCH_EVERY_LAYERS * number for number in range(num_launches + 1)]
    launches = [sum(by_layer[first:end]) for first, end in pairwise([*ends, len(by_layer)])]
    return max(sum(launches[first : first + MAX_LAUNCHED + 1]) for first in range(len(launches)))


def grouped_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """The rows, longest first, in groups whose padding costs little. The rows of a group are in order."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        longest = lengths[groups[-1][0]] if groups else 0
        own = lengths[row]
        if groups and (own >= MIN_GROUP_SHARE * longest or longest - own <= MAX_GROUP_PADDING):
            groups[-1].append(row)
        else:
            groups.append([row])
    return [sorted(rows) for rows in groups]
