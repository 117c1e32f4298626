"""How large a pass is made: rows and width. Pure Python.

Where a new shape is slow to begin with (its pass is traced, its kernels are looked up and loaded) a few
shapes do for all: a pass is padded to one of them where that costs next to nothing. Elsewhere it is as large
as its rows, but for a width that is known to cost less than a narrower one.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.request import MAX_DEPTH
from outrider.speculate.costs import CostTable

ALL_DEPTHS = tuple(range(MAX_DEPTH + 1))
FEW_DEPTHS = (0, 1, 2, 4, 8)
ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
NEXT_TO_NOTHING = 1.08  # of a step's time, over that of the smaller shape
CELL_STEP, CELL_PARTS = 128, 8  # how finely long rows are told apart
PROMPT_STEP, PROMPT_PARTS = 16, 8  # tokens of a prompt that are read at once are rounded up by so much


class Shapes:
    def __init__(self, costs: CostTable, few: bool) -> None:
        self._costs = costs
        self._few = few
        self._rows: dict[tuple[int, int, int, int], int] = {}

    @property
    def depths(self) -> Sequence[int]:
        """Those that rows on auto may have."""
        return FEW_DEPTHS if self._few else ALL_DEPTHS

    def decoding(self, num_rows: int, width: int, num_cells: int, num_slots: int) -> tuple[int, int]:
        """Rows and width of a pass that needs so many, over rows of up to `num_cells` in `num_slots`."""
        if not self._few:
            return num_rows, self._costs.best_width(num_rows, width)
        key = num_rows, width, rounded_up(num_cells, CELL_STEP, CELL_PARTS), num_slots
        rows = self._rows.get(key)
        if rows is None:
            rows = self._rows[key] = self._most_rows(*key)
        wider = 1 + next(depth for depth in FEW_DEPTHS if depth >= width - 1)
        if self._is_near(rows, wider, rows, width, 0):
            width = wider
        return rows, self._costs.best_width(rows, width)

    def prompt_width(self, width: int) -> int:
        return rounded_up(width, PROMPT_STEP, PROMPT_PARTS) if self._few else width

    def _most_rows(self, num_rows: int, width: int, num_cells: int, num_slots: int) -> int:
        more = (count for count in (*ROW_COUNTS, num_slots) if num_rows < count <= num_slots)
        near = (count for count in more if self._is_near(count, width, num_rows, width, num_cells))
        return max(near, default=num_rows)

    def _is_near(self, rows: int, width: int, least_rows: int, least_width: int, num_cells: int) -> bool:
        """By what was measured alone, so that a shape stays what it is while costs are corrected."""
        least = self._costs.measured_s(least_rows, least_width, num_cells)
        return self._costs.measured_s(rows, width, num_cells) <= NEXT_TO_NOTHING * least


def row_count(num_rows: int) -> int:
    """The slots that are made for so many rows, so that joining rarely moves the others."""
    return next((count for count in ROW_COUNTS if count >= num_rows), num_rows)


def rounded_up(num: int, step: int, parts: int) -> int:
    """To a multiple of `step`; beyond `parts` of them by less than one of that many parts."""
    step = max(step, (1 << num.bit_length()) // (2 * parts))
    return -(-num // step) * step
