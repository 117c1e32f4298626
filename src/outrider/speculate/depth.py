"""How deep each row drafts: a pure function of costs, chances and requests. No model, no clock, no state.

A forward pass is as wide as its widest row, so a width is paid once, by all rows, and every row may use it.
What counts is the mean time that a row waits for a token. Rows whose depth is free are taken together: what
one pays for the others now, they pay for it when its text is the easier one. A row that asked for its depth
gets nothing back, so its wait counts by itself.

Two questions are answered for a step:

    feed   how many of the drafts at hand go into this step's forward pass, and whose
    next   how many drafts the head makes now, for the step after this one

`next` is the depth of the best steady pace. `feed` takes the drafts at hand whose expected tokens are worth
more than the seconds that their width costs at that pace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from outrider.request import MAX_DEPTH
from outrider.speculate.shapes import ALL_DEPTHS

MARGIN = 1.05  # what drafting has to promise before it is begun, and while rows that never draft pay for it


@dataclass(frozen=True, slots=True)
class RowOutlook:
    """One decoding row: what it could feed now, and what it expects of its next step."""

    offers: Sequence[Sequence[float]] = ()  # a drafter each: the chances that its drafts 1..j all stand
    fixed: int | None = None  # it asked for this depth; None: the choice is free
    from_head: Sequence[float] = ()  # chances of the drafts that the head may make for its next step
    otherwise: Sequence[float] = ()  # chances of what others are likely to offer then; they cost no pass
    drafts: int = 0  # those that the head has made for it just now


@dataclass(frozen=True, slots=True)
class Choice:
    """What the rows do, in their order."""

    feed: tuple[tuple[int, int], ...]  # (which offer, how many of its drafts)
    next: tuple[int, ...]  # drafts wanted from the head; 0: it may rest
    promise: float = 1.0  # rows' wait without drafts over that with the best number of them, as it seems


StepCost = Callable[[int, int], float]  # (width, drafts that the head makes) -> seconds


@dataclass(frozen=True, slots=True)
class Steady:
    """Steps that are all alike, and what rows have of them."""

    depth: int  # drafts that the head makes
    seconds: float
    free_tokens: float  # a step brings a row whose depth is free, in the mean
    steps_waited: float  # for a token, summed over all rows
    promise: float = 1.0  # see Choice

    @property
    def waits(self) -> float:
        return self.seconds * self.steps_waited

    @property
    def pace(self) -> float:
        """What a second of all rows' time is worth, in tokens of free rows; theirs a second if all are."""
        return self.free_tokens**2 * self.steps_waited / self.seconds


def choose(
    rows: Sequence[RowOutlook],
    cost_now: StepCost,
    cost_next: StepCost,
    head_row_s: Callable[[int], float],
    depths: Sequence[int] = ALL_DEPTHS,
    another: float = 1.0,
) -> Choice:
    """The depths at which rows wait least for a token, of those that may be chosen.

    `cost_next` is that of the next batch, `head_row_s` what one row adds to the head's passes at a depth.
    `another`: what another depth than the last has to promise, over that one.
    """
    steady = best_steady(rows, cost_next, depths, another)
    least = steady.pace * head_row_s(steady.depth)  # tokens that a row's part in its passes has to bring
    wanted = tuple(_wanted(row, steady.depth, least) for row in rows)
    made = max(wanted, default=0)
    width = _best_width(rows, lambda width: cost_now(width, made), steady.pace, depths)
    return Choice(tuple(_best_offer(row, width) for row in rows), wanted, steady.promise)


def best_steady(
    rows: Sequence[RowOutlook], cost: StepCost, depths: Sequence[int] = ALL_DEPTHS, another: float = 1.0
) -> Steady:
    """The head's depth at which rows wait least, at least what is made anyway."""
    free = [row for row in rows if row.fixed is None]
    wide = max((row.fixed for row in rows if row.fixed is not None), default=0)  # a width that is paid anyway
    made = max((min(row.fixed, len(row.from_head)) for row in rows if row.fixed is not None), default=0)
    most = max((len(row.from_head) for row in free), default=0)
    by_head, by_others = _expected(row.from_head for row in free), _expected(row.otherwise for row in free)
    others_wait = sum(1 / (1 + sum(row.from_head[: row.fixed])) for row in rows if row.fixed is not None)

    def at(depth: int, width: int) -> Steady:
        depth = max(depth, made)
        tokens = 1 + (by_head[depth] + by_others[width]) / max(1, len(free))
        return Steady(depth, cost(1 + width, depth), tokens, len(free) / tokens + others_wait)

    def best_at(depth: int) -> Steady:
        least = max(wide, depth)
        wider = [width for width in depths if width > least] if by_others[-1] else []
        return min((at(depth, width) for width in (least, *wider)), key=lambda steady: steady.waits)

    plain = best = best_at(0)
    last = max((row.drafts for row in free), default=0)
    hurdle = best.waits if last and not others_wait else best.waits / MARGIN
    drafting = [best_at(depth) for depth in depths if 0 < depth <= most]
    for found in sorted(drafting, key=lambda found: found.depth != last):  # the last one has the first say
        if found.waits < hurdle:
            best, hurdle = found, found.waits / (another if found.depth == last else 1.0)
    if not drafting:
        return best
    return replace(best, promise=plain.waits / min(found.waits for found in drafting))


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


def _best_width(
    rows: Sequence[RowOutlook], cost: Callable[[int], float], pace: float, depths: Sequence[int]
) -> int:
    """The most drafts that any row feeds: where tokens gained less seconds times pace are at their best."""
    gained = [0.0] * (MAX_DEPTH + 1)
    floor = most = 0
    for row in rows:
        if not row.offers:
            continue
        longest = max(len(offer) for offer in row.offers)
        most = max(most, longest)
        if row.fixed is not None:
            floor = max(floor, min(row.fixed, longest))
            continue
        sums = [[0.0, *accumulate(offer)] for offer in row.offers]
        for width in range(1, MAX_DEPTH + 1):
            gained[width] += max(each[min(width, len(each) - 1)] for each in sums)
    if most == floor:
        return floor
    widths = [floor, *(width for width in depths if floor < width <= most)]
    worth = {width: gained[width] - pace * cost(1 + width) for width in widths}
    return max(widths, key=lambda width: (worth[width], -width))


def _best_offer(row: RowOutlook, width: int) -> tuple[int, int]:
    """Which of its offers a row feeds at this width, and how much of it."""
    if not row.offers:
        return 0, 0
    num = width if row.fixed is None else row.fixed
    best = max(range(len(row.offers)), key=lambda i: (sum(row.offers[i][:num]), -i))
    return best, min(num, len(row.offers[best]))
