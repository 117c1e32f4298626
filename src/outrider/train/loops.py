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
    last = len(token_ids) - 1
    for period in range(1, min(MAX_PERIOD, len(token_ids) // 3) + 1):
        num = 0  # tokens at the end that equal the token one period before
        while last - num - period >= 0 and token_ids[last - num] == token_ids[last - num - period]:
            num += 1
        if num >= max(PERIODS_LEFT * period, MIN_REPEATED):
            return tuple(token_ids[: len(token_ids) - num + (PERIODS_LEFT - 1) * period])
    return tuple(token_ids)
