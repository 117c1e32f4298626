"""Endless loops: small models fall into them, and a head that trains on them learns little else.

Pure functions of token ids.
"""

from collections.abc import Sequence

LONGEST_PERIOD = 64
LEAST_REPEATED = 24  # tokens: shorter repetitions are ordinary text
NUM_KEPT = 2  # periods of a loop that stay


def cut_loop(token_ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens without the rest of a loop in which they end; the same tokens if they end in none.

    x x x x [a b c] [a b c] a b c a b c a b        a tail of period 3
             kept    kept   cut
    """
    return tuple(token_ids[: _kept_length(token_ids)])


def _kept_length(token_ids: Sequence[int]) -> int:
    for period in range(1, min(LONGEST_PERIOD, len(token_ids) // 3) + 1):
        repeated = _num_repeated(token_ids, period)  # tokens that equal the one a period before
        if repeated >= max(NUM_KEPT * period, LEAST_REPEATED):
            return len(token_ids) - repeated + (NUM_KEPT - 1) * period
    return len(token_ids)


def _num_repeated(token_ids: Sequence[int], period: int) -> int:
    last = len(token_ids) - 1
    count = 0
    while last - count - period >= 0 and token_ids[last - count] == token_ids[last - count - period]:
        count += 1
    return count
