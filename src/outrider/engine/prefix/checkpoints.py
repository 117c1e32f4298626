"""Where a row's recurrent state is worth keeping. It cannot be cut, so a row must stop at such a place. Pure.

Places are ends of whole blocks. A prompt's: where its first message and its last ones end, every so many
cells, its own end, and where another text was seen to branch off. An answer's: its last block's end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

STATE_EVERY = 1024  # cells
NUM_LAST_MESSAGES = 2


def prompt_stops(token_ids: Sequence[int], end_ids: Collection[int], block_size: int) -> set[int]:
    """Cells after which a prompt's state is kept; `end_ids` end messages. All leave something to be fed."""
    ends = [place + 1 for place, token_id in enumerate(token_ids) if token_id in end_ids]
    places = [*ends[:1], *ends[-NUM_LAST_MESSAGES:], *range(STATE_EVERY, len(token_ids), STATE_EVERY)]
    whole = {(place - 1) // block_size * block_size for place in (*places, len(token_ids))}
    return whole - {0}


def next_stop(stops: Collection[int], num_cells: int) -> int | None:
    return min((stop for stop in stops if stop > num_cells), default=None)
