"""The shapes of passes: how many rows, columns and cells a forward pass has. Pure Python.

Where passes are traced, the first pass of a new shape is slow: the pass is traced, and its kernels are
looked up and loaded. So a few shapes serve all passes, and a pass is padded to the next of them:

    the padded pass costs at most 1.08 times as much     always padded
    it costs at most 1.35 times as much                  padded, unless the pass's own shape is frequent
    it costs more                                        never padded

Where passes are not traced, a pass is as large as its rows need.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.request import MAX_DEPTH
from outrider.speculate.costs import CostTable

ALL_DEPTHS = tuple(range(MAX_DEPTH + 1))
FEW_DEPTHS = (0, 1, 2, 4, 8)  # depths of rows on auto where passes are traced; all depths cost 3 %
FEW_WIDTHS = (1, 2, 3, 5, 8, 9)  # 1 + FEW_DEPTHS, and 8: from 8 tokens on MLX's quantised matmuls cost less
FEW_ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # of traced passes; chosen by hand

# Limits on the cost of a padded pass, as a multiple of the cost of the pass itself. Chosen by hand on an
# H200. There few shapes took tracing from 17.6 of 38 seconds to 3.7 of 18 (docs/LOG.md, "A trace a shape").
FREE_PADDING = 1.08  # from the ablation: 1.0 costs 1.3 %; 1.16 gains as much where tables are exact
MAX_PADDING = 1.35  # from the ablation: 1.18 to 1.7 are equal, 1.0 costs 3 %
# A wider pass is chosen if it costs less than this share of the pass. The costs of small models on a GPU are
# noise: one row of width 9 was measured at 0.77 of width 1 (docs/LOG.md, "A trace a shape").
WIDEN_BELOW = 0.75  # from the ablation: 0.5 costs 2 %, never 5 %
MAX_PADDING_CELLS = 8192  # cells that all padding rows of a pass may read; chosen by hand
FREQUENT_SHARE = 0.25  # share of recent steps from which a shape is frequent; chosen by hand
NEWEST_STEP_SHARE = 0.01  # weight of the newest step in a shape's share: about 100 steps count
MIN_DEPTH_GAIN = 1.05  # expected speed-up from which a depth is changed; 1.0 and 1.1 cost 1.4 %

# Sizes are rounded up to multiples of STEP, large sizes more: see `rounded_up`. Chosen by hand.
CELL_STEP, CELL_PARTS = 256, 8  # cells that attention reads
PREFILL_STEP, PREFILL_PARTS = 16, 8  # tokens of a prompt that a pass feeds
CAPACITY_PARTS = 2  # cells that the caches have: every shape changes when they grow
BLOCKS_STEP, BLOCKS_PARTS = 16, 8  # blocks that the caches have, likewise

RowsAndWidth = tuple[int, int]


class ShapePolicy:
    """Chooses the shape of every pass, and the depths that rows on auto may have."""

    def __init__(self, costs: CostTable, few: bool) -> None:
        """`few`: passes are traced, so few shapes shall serve all."""
        self._costs = costs
        self._few = few
        self._num_steps = 0
        self._shares: dict[RowsAndWidth, tuple[float, int]] = {}  # share of the steps, at which step
        self._padded_cache: dict[tuple[RowsAndWidth, bool, int, int], RowsAndWidth] = {}

    @property
    def depths(self) -> Sequence[int]:
        """The depths that rows on auto may have."""
        return FEW_DEPTHS if self._few else ALL_DEPTHS

    @property
    def min_depth_gain(self) -> float:
        """Expected speed-up for which a depth is changed: where passes are traced, new shapes cost time."""
        return MIN_DEPTH_GAIN if self._few else 1.0

    def decode_shape(self, num_rows: int, width: int, num_cells: int, num_slots: int) -> RowsAndWidth:
        """The shape of a pass that needs `num_rows` and `width`. Its longest row has `num_cells`.

        `num_slots`: slots of the caches, the most rows that the pass may have.
        """
        if not self._few:
            return num_rows, width
        own = (num_rows, width)
        is_frequent = self._share(own) >= FREQUENT_SHARE
        key = own, is_frequent, rounded_up(num_cells, CELL_STEP, CELL_PARTS), num_slots
        if key not in self._padded_cache:
            self._padded_cache[key] = self._padded(*key)
        return self._padded_cache[key]

    def count_step(self, num_rows: int, width: int) -> None:
        """Count a step whose decode pass needs this shape: frequent shapes are padded less."""
        if self._few:
            share = self._share((num_rows, width))
            self._num_steps += 1
            self._shares[num_rows, width] = share + NEWEST_STEP_SHARE, self._num_steps

    def prefill_width(self, width: int) -> int:
        return rounded_up(width, PREFILL_STEP, PREFILL_PARTS) if self._few and width > 1 else width

    def capacity(self, num_cells: int, capacity_step: int) -> int:
        """Cells that the caches should have for rows that need `num_cells`."""
        return rounded_up(num_cells, capacity_step, CAPACITY_PARTS) if self._few else num_cells

    def num_blocks(self, roomy: int) -> int:
        """Blocks that the caches should have where `roomy` are enough for some time."""
        return rounded_up(roomy, BLOCKS_STEP, BLOCKS_PARTS) if self._few else roomy

    def _share(self, own: RowsAndWidth) -> float:
        share, step = self._shares.get(own, (0.0, 0))
        return share * (1 - NEWEST_STEP_SHARE) ** (self._num_steps - step)

    def _padded(self, own: RowsAndWidth, is_frequent: bool, num_cells: int, num_slots: int) -> RowsAndWidth:
        """Uses uncorrected costs, so that a shape does not change while corrections do."""
        num_rows, width = own
        few_width = next(few for few in FEW_WIDTHS if few >= width)
        max_rows = min(num_slots, num_rows + MAX_PADDING_CELLS // max(1, num_cells))
        counts = [count for count in FEW_ROW_COUNTS if num_rows <= count <= max_rows] or [num_rows]
        found, own_s = self._at_best_width(num_rows, width, num_cells)
        limit = FREE_PADDING if is_frequent else MAX_PADDING
        for count in counts:
            shape, seconds = self._at_best_width(count, few_width, num_cells)
            if seconds <= limit * own_s:
                found = shape
            limit = FREE_PADDING  # padding beyond the next number of rows has to be free
        return found

    def _at_best_width(self, num_rows: int, width: int, num_cells: int) -> tuple[RowsAndWidth, float]:
        """The shape, with a greater width where that costs much less, and its cost."""
        widths = [width, *(few for few in FEW_WIDTHS if few > width)]
        cost_s = {w: self._costs.uncorrected_s(num_rows, w, num_cells) for w in widths}
        best = min(widths, key=lambda w: (cost_s[w], w))
        if cost_s[best] >= WIDEN_BELOW * cost_s[width]:
            best = width
        return (num_rows, best), cost_s[best]


def num_slots_for(num_rows: int) -> int:
    """Slots that are made for `num_rows` rows: a few more, so that a joining row rarely moves the others."""
    return next((count for count in FEW_ROW_COUNTS if count >= num_rows), num_rows)


def rounded_up(num: int, step: int, parts: int) -> int:
    """`num` rounded up to a multiple of `step`, or, if that is more, of 2**bits / (2 * parts).

    2**bits is the next power of two above `num`. So a large number grows by less than one part in `parts`.
    """
    step = max(step, (1 << num.bit_length()) // (2 * parts))
    return -(-num // step) * step
