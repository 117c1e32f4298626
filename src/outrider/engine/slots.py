"""The slot of each sequence: its row in the cache buffers. Pure Python.

    slots   0 ........ D-1 | D ......... D+P-1 | D+P ....
            decoding       | prefilling        | free

Decoding rows come first and without gaps, so that their forward pass reads the buffers in place. A row that
leaves is replaced by one other row; the rest stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterable

from outrider.engine.sequence import Sequence
from outrider.plan import Move


class SlotTable:
    def __init__(self) -> None:
        self._rows: list[Sequence | None] = []

    def __len__(self) -> int:
        return sum(row is not None for row in self._rows)

    @property
    def num_spanned(self) -> int:
        """One more than the highest slot in use."""
        return max((slot + 1 for slot, row in enumerate(self._rows) if row is not None), default=0)

    def sequences(self) -> Iterable[Sequence]:
        return (row for row in self._rows if row is not None)

    def join(self, sequence: Sequence) -> None:
        slot = next((i for i, row in enumerate(self._rows) if row is None), len(self._rows))
        if slot == len(self._rows):
            self._rows.append(None)
        self._rows[slot] = sequence
        sequence.slot = slot

    def leave(self, sequence: Sequence) -> None:
        assert sequence.slot is not None and self._rows[sequence.slot] is sequence
        self._rows[sequence.slot] = None
        sequence.slot = None

    def settle(self) -> list[Move]:
        """Bring decoding rows to the front and close the gaps. Returns the moves of their cells, in order."""
        rows = list(self.sequences())
        num_decoding = sum(row.is_decoding for row in rows)
        moves = self._fill(0, num_decoding, [row for row in rows if row.is_decoding])
        moves += self._fill(num_decoding, len(rows), [row for row in rows if not row.is_decoding])
        del self._rows[len(rows) :]
        return moves

    def _fill(self, low: int, high: int, members: list[Sequence]) -> list[Move]:
        """Make slots low..high-1 hold exactly the members. Members that are there already do not move."""
        inside = {id(row) for row in members}
        strays = [row for row in members if not low <= _slot(row) < high]
        moves = []
        for slot in range(low, high):
            held = self._rows[slot]
            if held is not None and id(held) in inside:
                continue
            moves += self._swap(_slot(strays.pop()), slot)
        return moves

    def _swap(self, source: int, target: int) -> list[Move]:
        mover, held = self._rows[source], self._rows[target]
        assert mover is not None
        self._rows[source], self._rows[target] = held, mover
        mover.slot = target
        if held is not None:
            held.slot = source
        if mover.num_cached == 0 and (held is None or held.num_cached == 0):
            return []  # neither row has cached cells
        return [Move(source, target, one_way=held is None or held.num_cached == 0)]


def _slot(row: Sequence) -> int:
    assert row.slot is not None
    return row.slot
