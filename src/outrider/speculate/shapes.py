"""How large a pass is made: rows, width, cells. Pure Python.

Where a new shape is slow to begin with (its pass is traced, its kernels are looked up and loaded) a few
shapes do for all, and a pass is padded to the next of them:

    where that costs next to nothing       always
    where it costs something               unless the pass's own shape comes often
    where it costs much                    never

Elsewhere a pass is as large as its rows, but for a width that is known to cost less than a narrower one.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.request import MAX_DEPTH
from outrider.speculate.costs import CostTable

ALL_DEPTHS = tuple(range(MAX_DEPTH + 1))
FEW_DEPTHS = (0, 1, 2, 4, 8)
FEW_WIDTHS = (1, 2, 3, 5, 8, 9)  # of those drafts, and 8, from which on quantised products cost less
ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
NEXT_TO_NOTHING, MUCH = 1.08, 1.35  # of a step's time, over that of the smaller shape
WORTH_WIDENING = 0.75  # of the narrower pass: a cliff, not what one measurement differs from the next by
MOST_MORE_CELLS = 8192  # that rows which only fill a pass may read, whatever was measured
OFTEN = 0.25  # of the last steps, of which
STEP_SHARE = 0.01  # is the newest
CELL_STEP, CELL_PARTS = 256, 8  # how finely long rows are told apart
PROMPT_STEP, PROMPT_PARTS = 16, 8  # tokens of a prompt that are read at once are rounded up by so much
CAPACITY_PARTS = 2
ANOTHER = 1.05

Extent = tuple[int, int]  # rows, width


class Shapes:
    def __init__(self, costs: CostTable, few: bool) -> None:
        self._costs = costs
        self._few = few
        self._num_steps = 0
        self._shares: dict[Extent, tuple[float, int]] = {}  # of the steps up to that one
        self._found: dict[tuple[Extent, bool, int, int], Extent] = {}

    @property
    def depths(self) -> Sequence[int]:
        """Those that rows on auto may have."""
        return FEW_DEPTHS if self._few else ALL_DEPTHS

    @property
    def another(self) -> float:
        """What another depth than the last has to promise: it brings shapes of its own."""
        return ANOTHER if self._few else 1.0

    def decoding(self, num_rows: int, width: int, num_cells: int, num_slots: int) -> Extent:
        """Rows and width of a pass that needs so many, over rows of up to `num_cells` in `num_slots`."""
        if not self._few:
            return num_rows, self._costs.best_width(num_rows, width)
        own, num_cells = (num_rows, width), rounded_up(num_cells, CELL_STEP, CELL_PARTS)
        key = own, self._share(own) >= OFTEN, num_cells, num_slots
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._padded(*key)
        return found

    def note(self, num_rows: int, width: int) -> None:
        """A step needs a pass of so many."""
        if self._few:
            own = num_rows, width
            share = self._share(own)
            self._num_steps += 1
            self._shares[own] = share + STEP_SHARE, self._num_steps

    def prompt_width(self, width: int) -> int:
        return rounded_up(width, PROMPT_STEP, PROMPT_PARTS) if self._few and width > 1 else width

    def capacity(self, num_cells: int, page: int) -> int:
        """Cells that the caches are given where rows need so many: all shapes change when they grow."""
        return rounded_up(num_cells, page, CAPACITY_PARTS) if self._few else num_cells

    def _share(self, own: Extent) -> float:
        share, then = self._shares.get(own, (0.0, 0))
        return share * (1 - STEP_SHARE) ** (self._num_steps - then)

    def _padded(self, own: Extent, comes_often: bool, num_cells: int, num_slots: int) -> Extent:
        """By what was measured alone, so that a shape stays what it is while costs are corrected."""
        num_rows, width = own
        wide = next(few for few in FEW_WIDTHS if few >= width)
        most = min(num_slots, num_rows + MOST_MORE_CELLS // max(1, num_cells))
        counts = [count for count in ROW_COUNTS if num_rows <= count <= most] or [num_rows]
        found, least_s = self._at_best_width(num_rows, width, num_cells)
        limit = NEXT_TO_NOTHING if comes_often else MUCH
        for count in counts:
            shape, seconds = self._at_best_width(count, wide, num_cells)
            if seconds <= limit * least_s:
                found = shape
            limit = NEXT_TO_NOTHING  # for more than the next number of rows
        return found

    def _at_best_width(self, num_rows: int, width: int, num_cells: int) -> tuple[Extent, float]:
        """A wider pass where that costs less, and what it costs."""
        widths = [width, *(few for few in FEW_WIDTHS if few > width)]
        cost = {w: self._costs.measured_s(num_rows, w, num_cells) for w in widths}
        best = min(widths, key=lambda w: (cost[w], w))
        if cost[best] >= WORTH_WIDENING * cost[width]:
            best = width
        return (num_rows, best), cost[best]


def row_count(num_rows: int) -> int:
    """The slots that are made for so many rows, so that joining rarely moves the others."""
    return next((count for count in ROW_COUNTS if count >= num_rows), num_rows)


def rounded_up(num: int, step: int, parts: int) -> int:
    """To a multiple of `step`; beyond `parts` of them by less than one of that many parts."""
    step = max(step, (1 << num.bit_length()) // (2 * parts))
    return -(-num // step) * step
