"""What of a match in the prefix index a row can use: arithmetic on blocks, nothing else. Pure.

blocks   headed | headed | head rested from here on | rested | headed again
usable   ---------------------------------------------------> |
headed   ---------------------->                                the head catches up with the rest
"""

from __future__ import annotations

from outrider.cache.prefix_index import Match
from outrider.plan import BlockPiece


def num_followed(match: Match, block_size: int) -> int:
    """Cells up to where a head that has rested cannot catch up: what it missed is one stretch only."""
    has_rested = False
    for number, node in enumerate(match.nodes):
        if has_rested and node.num_head_cached:
            return number * block_size
        has_rested = has_rested or not node.is_headed
    return match.num_keys


def first_deferred(match: Match) -> int:
    """The number of the first block that the head was not fed all of; that of all blocks if there is none."""
    return next((i for i, node in enumerate(match.nodes) if not node.is_headed), len(match.nodes))


def num_head_cached(match: Match, num_cells: int, block_size: int) -> int:
    """Of the match's first `num_cells`, those that the head was fed."""
    first = first_deferred(match)
    if first == len(match.nodes):
        return num_cells
    return min(num_cells, first * block_size + match.nodes[first].num_head_cached)


def last_state(match: Match, num_cells: int) -> int:
    """The last place at or before `num_cells` whose recurrent state is kept."""
    last = place = 0
    for node in match.nodes:
        place += len(node.keys)
        if node.state_id is not None and place <= num_cells:
            last = place
    return last


def pieces(match: Match, start: int, end: int, block_size: int) -> tuple[BlockPiece, ...]:
    """The parts of blocks that hold cells start..end-1."""
    found = []
    for number, node in enumerate(match.nodes):
        first, last = max(start - number * block_size, 0), min(end - number * block_size, block_size)
        if first < last:
            found.append(BlockPiece(node.block_id, first, last))
    return tuple(found)
