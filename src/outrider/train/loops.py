"""Endless loops at the end of an answer. Small models produce loops, and a head must not learn them.

Pure functions of token ids.
"""

from collections.abc import Sequence

MAX_PERIOD = 64  # tokens; chosen by hand
MIN_REPEATED = 24  # tokens; shorter repetitions occur in ordinary text; chosen by hand
PERIODS_LEFT = 2  # periods of a loop that are not cut


def cut_loop(token_ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens without the loop at their end, except its first two periods.

    x x x x [a b c] [a b c] a b c a b c a b        a loop of period 3
             stays   stays  cut
    """
    return tuple(token_ids[: _length_without_loop(token_ids)])


def _length_without_loop(token_ids: Sequence[int]) -> int:
    for period in range(1, min(MAX_PERIOD, len(token_ids) // 3) + 1):
        repeated = _num_repeated(token_ids, period)  # tokens that equal the token one period before
        if repeated >= max(PERIODS_LEFT * period, MIN_REPEATED):
            return len(token_ids) - repeated + (PERIODS_LEFT - 1) * period
    return len(token_ids)


def _num_repeated(token_ids: Sequence[int], period: int) -> int:
    last = len(token_ids) - 1
    count = 0
    while last - count - period >= 0 and token_ids[last - count] == token_ids[last - count - period]:
        count += 1
    return count
