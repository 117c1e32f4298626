"""Which drafts are worth feeding: a pure function of their chances and of what a step costs.

A draft that is accepted with chance p brings p tokens, and makes the step longer. The drafts are chosen for
which

    token_s * (sum of their chances)  -  (seconds that they add to the step)

is largest. `token_s`, what a token is worth, is the time in which a step without drafts makes one. Every row
may feed another number of drafts. Models that compute padding as if it were tokens pay for the widest row in
all rows: so the best drafts are found for every width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

StepCost = Callable[[float, int], float]  # (tokens that are fed in all, tokens of the widest row) -> seconds


@dataclass(frozen=True, slots=True)
class RowOffers:
    """What a decoding row could feed. Entry j of an offer is the chance that drafts 1..j+1 are all right."""

    offers: Sequence[Sequence[float]] = ()
    fixed_depth: int | None = None  # the depth that the request sets; None: any
    worths: Sequence[float] = ()  # of a token of each offer, as a share of `token_s`; empty: 1 each

    def worth(self, which: int) -> float:
        return self.worths[which] if self.worths else 1.0


def choose_drafts(
    rows: Sequence[RowOffers], cost: StepCost, token_s: float, min_chance: float
) -> list[tuple[int, int]]:
    """For each row: which offer, and how many of its drafts. No draft under `min_chance` can pay.

    `token_s`: what a token is worth.
    """
    if not rows:
        return []
    fed = [_fixed(row) if row.fixed_depth is not None else _best(row, min_chance) for row in rows]
    drafts = [  # of rows that are free to feed fewer
        (chance * row.worth(which), i, place)
        for i, (row, (which, num)) in enumerate(zip(rows, fed, strict=True))
        if row.fixed_depth is None and num
        for place, chance in enumerate(row.offers[which][:num], 1)
    ]
    drafts.sort(key=lambda draft: (-draft[0], draft[2]))  # a row's own drafts in their order
    nums = [0 if row.fixed_depth is None else num for row, (_, num) in zip(rows, fed, strict=True)]
    num_tokens, fixed_width = len(rows) + sum(nums), 1 + max(nums, default=0)
    best_gain_s, best = 0.0, list(nums)
    before_s = cost(num_tokens, fixed_width)
    for most in range(1, max((place for *_, place in drafts), default=0) + 1):
        width = max(fixed_width, 1 + most)
        gain_s, counts, is_widest = 0.0, list(nums), False
        for num, (worth, i, place) in enumerate((d for d in drafts if d[2] <= most), 1):
            gain_s += token_s * worth
            counts[i] = place
            is_widest = is_widest or place == most
            if is_widest:  # narrower sets have been compared at a smaller `most`
                net_s = gain_s - (cost(num_tokens + num, width) - before_s)
                if net_s > best_gain_s:
                    best_gain_s, best = net_s, list(counts)
    return [(which, num) for (which, _), num in zip(fed, best, strict=True)]


def _fixed(row: RowOffers) -> tuple[int, int]:
    """The offer that a row of fixed depth feeds: the one that brings most."""
    if not row.offers:
        return 0, 0
    which = max(range(len(row.offers)), key=lambda i: (sum(row.offers[i][: row.fixed_depth]), -i))
    return which, min(row.fixed_depth or 0, len(row.offers[which]))


def _best(row: RowOffers, min_chance: float) -> tuple[int, int]:
    """The offer whose drafts exceed `min_chance` by most, and how many of them do."""
    best, best_gain = (0, 0), 0.0
    for which, chances in enumerate(row.offers):
        gain, num, worth = 0.0, 0, row.worth(which)
        for chance in chances:
            if chance * worth < min_chance:
                break
            gain, num = gain + chance * worth - min_chance, num + 1
        if gain > best_gain:
            best, best_gain = (which, num), gain
    return best
