"""How deep each row drafts: a pure function of costs, chances and wishes. No model, no clock, no state.

A forward pass is as wide as its widest row, so a width is paid once and every row may use it. Two questions
are answered for a step:

    feed   how many of the drafts at hand go into this step's forward pass, and whose
    next   how many drafts the head makes now, for the step after this one

`next` is the depth of the best steady pace: tokens a step over seconds a step. `feed` takes the drafts at
hand whose expected tokens are worth more than the seconds that their width costs at that pace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from outrider.request import MAX_DEPTH

MARGIN = 1.05  # drafting with the head has to promise this much before it is begun: trials cost, too


@dataclass(frozen=True, slots=True)
class RowOutlook:
    """One decoding row: what it could feed now, and what it expects of its next step."""

    offers: Sequence[Sequence[float]] = ()  # a drafter each: the chances that its drafts 1..j all stand
    fixed: int | None = None  # it asked for this depth; None: the choice is free
    from_head: Sequence[float] = ()  # chances of the drafts that the head may make for its next step
    otherwise: Sequence[float] = ()  # chances of what others are likely to offer then; they cost no pass


@dataclass(frozen=True, slots=True)
class Choice:
    """What the rows do, in their order."""

    feed: tuple[tuple[int, int], ...]  # (which offer, how many of its drafts)
    next: tuple[int, ...]  # drafts wanted from the head; 0: it may rest
    pace: float  # tokens a second that this promises


StepCost = Callable[[int, int], float]  # (width, drafts that the head makes) -> seconds


def choose(
    rows: Sequence[RowOutlook], cost_now: StepCost, cost_next: StepCost, head_row_s: Callable[[int], float]
) -> Choice:
    """The depths that bring the most tokens a second over all rows.

    `cost_next` is that of the next batch, `head_row_s` what one row adds to the head's passes at a depth.
    """
    depth, pace = best_depth(rows, cost_next)
    least = pace * head_row_s(depth)  # tokens that a row's part in the head's passes has to bring
    wanted = tuple(_wanted(row, depth, least) for row in rows)
    made = max(wanted, default=0)
    width = _best_width(rows, lambda width: cost_now(width, made), pace)
    return Choice(tuple(_best_offer(row, width) for row in rows), wanted, pace)


def best_depth(rows: Sequence[RowOutlook], cost: StepCost) -> tuple[int, float]:
    """The head's depth at which the steady pace is best, at least what is made anyway, and that pace."""
    wide = max((row.fixed for row in rows if row.fixed is not None), default=0)  # a width that is paid anyway
    made = max((min(row.fixed, len(row.from_head)) for row in rows if row.fixed is not None), default=0)
    most = max((len(row.from_head) for row in rows if row.fixed is None), default=0)
    by_head, by_others = _expected(row.from_head for row in rows), _expected(row.otherwise for row in rows)

    def pace(depth: int, width: int) -> float:
        tokens = len(rows) + by_head[max(depth, made)] + by_others[width]
        return tokens / cost(1 + width, max(depth, made))

    widths = range(wide, MAX_DEPTH + 1) if by_others[-1] else range(wide, wide + 1)
    best, best_pace = 0, max(pace(0, width) for width in widths)
    hurdle = best_pace * MARGIN
    for depth in range(1, most + 1):
        widths = range(max(wide, depth), MAX_DEPTH + 1 if by_others[-1] else max(wide, depth) + 1)
        found = max(pace(depth, width) for width in widths)
        if found > hurdle:
            best, best_pace, hurdle = depth, found, found
    return max(best, made), best_pace


def _expected(chances: Iterator[Sequence[float]]) -> list[float]:
    """Tokens that all rows together expect of 0, 1, .. MAX_DEPTH drafts each."""
    by_place = [0.0] * MAX_DEPTH
    for each in chances:
        for place, chance in enumerate(each):
            by_place[place] += chance
    return [0.0, *accumulate(by_place)]


def _wanted(row: RowOutlook, depth: int, least: float) -> int:
    if row.fixed is not None:
        return min(row.fixed, len(row.from_head))
    return min(depth, len(row.from_head)) if sum(row.from_head[:depth]) >= least else 0


def _best_width(rows: Sequence[RowOutlook], cost: Callable[[int], float], pace: float) -> int:
    """The most drafts that any row feeds: where tokens gained less seconds times pace are at their best."""
    gained = [0.0] * (MAX_DEPTH + 1)
    floor = most = 0
    for row in rows:
        longest = max((len(offer) for offer in row.offers), default=0)
        most = max(most, longest)
        if row.fixed is not None:
            floor = max(floor, min(row.fixed, longest))
            continue
        sums = [[0.0, *accumulate(offer)] for offer in row.offers]
        for width in range(1, MAX_DEPTH + 1):
            gained[width] += max((each[min(width, len(each) - 1)] for each in sums), default=0.0)
    worth = [gained[width] - pace * cost(1 + width) for width in range(floor, min(most, MAX_DEPTH) + 1)]
    return floor + max(range(len(worth)), key=lambda i: (worth[i], -i))


def _best_offer(row: RowOutlook, width: int) -> tuple[int, int]:
    """Which of its offers a row feeds at this width, and how much of it."""
    if not row.offers:
        return 0, 0
    num = width if row.fixed is None else row.fixed
    best = max(range(len(row.offers)), key=lambda i: (sum(row.offers[i][:num]), -i))
    return best, min(num, len(row.offers[best]))
