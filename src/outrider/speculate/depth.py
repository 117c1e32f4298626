"""How deep each row drafts: a pure function of costs, chances and requests. No model, no clock, no state.

A pass is as wide as its widest row. So all rows pay for a width, and every row may use it. Two numbers are
chosen for every row of a step:

    feed              how many of its drafts go into this step's pass, and from which drafter
    num_drafts_next   how many drafts the head makes in this step for the row's next step

`num_drafts_next` comes from the depth that is best if all further steps use it (`best_depth`). The best
depth has the shortest wait for a token, summed over all rows:

    wait = step_s * (auto rows / tokens per auto row and step  +  sum over fixed rows of 1 / tokens per step)

Rows on auto are counted together, by their mean: one row's record is noisy, and each of them has harder and
easier texts. A row with a fixed depth pays for the others' width and gains nothing, so its wait counts by
itself.

`feed` has the width w at which expected tokens(w) - tokens_per_s * step_s(w) is largest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from outrider.request import MAX_DEPTH
from outrider.speculate.shapes import ALL_DEPTHS

# Expected speed-up from which drafting starts, and which it needs while rows of fixed depth pay for it. Rows
# that draft already go on down to a speed-up of 1: with a margin at every step, drafting went on and off
# (docs/LOG.md, "A margin only at the beginning").
MIN_SPEEDUP = 1.05


@dataclass(frozen=True, slots=True)
class RowForecast:
    """What one decoding row could feed now, and what its next step can expect.

    Chances are cumulative: entry j is the chance that drafts 1..j+1 are all accepted.
    """

    offers: Sequence[Sequence[float]] = ()  # for each drafter that has drafts now: their chances
    fixed_depth: int | None = None  # the depth that the request sets; None: auto
    head_chances: Sequence[float] = ()  # of the drafts that the head can make for the next step
    other_chances: Sequence[float] = ()  # of drafts that other drafters are likely to offer then
    last_depth: int = 0  # drafts that the head made for this step


@dataclass(frozen=True, slots=True)
class DepthChoice:
    """What the rows do in a step, in the order of the rows."""

    feed: tuple[tuple[int, int], ...]  # (which offer, how many of its drafts)
    num_drafts_next: tuple[int, ...]  # drafts that the head makes for the row's next step


StepCost = Callable[[int, int], float]  # (width, drafts that the head makes) -> seconds


@dataclass(frozen=True, slots=True)
class DepthForecast:
    """What rows can expect if all further steps have one depth."""

    depth: int  # drafts that the head makes in every step
    step_s: float
    auto_tokens: float  # tokens that a step brings to a row on auto, on average
    steps_per_token: float  # steps that a row waits for a token, summed over all rows

    @property
    def wait_s(self) -> float:
        """Seconds that a row waits for a token, summed over all rows."""
        return self.step_s * self.steps_per_token

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the rows on auto together have to gain to make up for one more second of step time.

        Follows from wait_s = step_s * (n / auto_tokens + fixed), by n * d(auto_tokens) / d(step_s) at which
        wait_s stays the same. Without rows of fixed depth it is n * auto_tokens / step_s.
        """
        return self.auto_tokens**2 * self.steps_per_token / self.step_s


def choose(
    rows: Sequence[RowForecast],
    cost_now: StepCost,
    cost_next: StepCost,
    head_row_s: Callable[[int], float],
    depths: Sequence[int] = ALL_DEPTHS,
    min_gain: float = 1.0,
) -> DepthChoice:
    """The drafts that rows feed and make.

    `cost_now`: of this step. `cost_next`: of the next step, whose batch may differ. `head_row_s(depth)`: what
    one row adds to the head's passes. `depths`: those that may be chosen. `min_gain`: see `best_depth`.
    """
    best = best_depth(rows, cost_next, depths, min_gain)
    # A row on auto drafts only if it expects more tokens than its part in the head's passes costs.
    min_tokens = best.tokens_per_s * head_row_s(best.depth)
    num_drafts_next = []
    for row in rows:
        num = min(best.depth if row.fixed_depth is None else row.fixed_depth, len(row.head_chances))
        is_worth_it = row.fixed_depth is not None or sum(row.head_chances[: best.depth]) >= min_tokens
        num_drafts_next.append(num if is_worth_it else 0)
    most = max(num_drafts_next, default=0)
    width = _best_width(rows, lambda width: cost_now(width, most), best.tokens_per_s, depths)
    feed = tuple(_best_offer(row, width) for row in rows)
    return DepthChoice(feed, tuple(num_drafts_next))


def best_depth(
    rows: Sequence[RowForecast], cost: StepCost, depths: Sequence[int] = ALL_DEPTHS, min_gain: float = 1.0
) -> DepthForecast:
    """The depth with the shortest wait. At least the drafts that the head makes for rows of fixed depth.

    `min_gain`: a depth other than the last one has to be faster by this factor.
    """
    auto = [row for row in rows if row.fixed_depth is None]
    fixed = [(row, row.fixed_depth) for row in rows if row.fixed_depth is not None]
    fixed_width = max((depth for _, depth in fixed), default=0)
    fixed_head_depth = max((min(depth, len(row.head_chances)) for row, depth in fixed), default=0)
    fixed_wait = sum(1 / (1 + sum(row.head_chances[:depth])) for row, depth in fixed)
    max_depth = max((len(row.head_chances) for row in auto), default=0)
    last_depth = max((row.last_depth for row in auto), default=0)
    head_tokens = _expected_tokens(row.head_chances for row in auto)
    other_tokens = _expected_tokens(row.other_chances for row in auto)

    def forecast(depth: int, width: int) -> DepthForecast:
        depth = max(depth, fixed_head_depth)
        tokens = 1 + (head_tokens[depth] + other_tokens[width]) / max(1, len(auto))
        return DepthForecast(depth, cost(1 + width, depth), tokens, len(auto) / tokens + fixed_wait)

    def forecast_at(depth: int) -> DepthForecast:
        """At the best width: a wider pass may pay where other drafters offer more than the head."""
        narrowest = max(fixed_width, depth)
        wider = [width for width in depths if width > narrowest] if other_tokens[-1] else []
        return min((forecast(depth, width) for width in (narrowest, *wider)), key=lambda each: each.wait_s)

    best = forecast_at(0)
    max_wait_s = best.wait_s if last_depth and not fixed_wait else best.wait_s / MIN_SPEEDUP
    drafting = [forecast_at(depth) for depth in depths if 0 < depth <= max_depth]
    for each in sorted(drafting, key=lambda each: each.depth != last_depth):  # the last depth comes first
        if each.wait_s < max_wait_s:
            best, max_wait_s = each, each.wait_s / (min_gain if each.depth == last_depth else 1.0)
    return best


def _expected_tokens(chances: Iterable[Sequence[float]]) -> list[float]:
    """Tokens that all rows together expect from 0, 1, .. MAX_DEPTH drafts each."""
    by_position = [0.0] * MAX_DEPTH
    for each in chances:
        for position, chance in enumerate(each):
            by_position[position] += chance
    return [0.0, *accumulate(by_position)]


def _best_width(
    rows: Sequence[RowForecast], cost: Callable[[int], float], tokens_per_s: float, depths: Sequence[int]
) -> int:
    """The most drafts that a row feeds now: expected tokens less the tokens that the step's time is worth."""
    gained = [0.0] * (MAX_DEPTH + 1)  # tokens that rows on auto expect, by number of drafts
    fixed_width = longest = 0
    for row in rows:
        if not row.offers:
            continue
        num_offered = max(len(offer) for offer in row.offers)
        longest = max(longest, num_offered)
        if row.fixed_depth is not None:
            fixed_width = max(fixed_width, min(row.fixed_depth, num_offered))
            continue
        sums = [[0.0, *accumulate(offer)] for offer in row.offers]
        for width in range(1, MAX_DEPTH + 1):
            gained[width] += max(each[min(width, len(each) - 1)] for each in sums)
    if longest == fixed_width:
        return fixed_width
    widths = [fixed_width, *(width for width in depths if fixed_width < width <= longest)]
    worth = {width: gained[width] - tokens_per_s * cost(1 + width) for width in widths}
    return max(widths, key=lambda width: (worth[width], -width))


def _best_offer(row: RowForecast, width: int) -> tuple[int, int]:
    """The offer that the row feeds at this width, and how many of its drafts."""
    if not row.offers:
        return 0, 0
    num = width if row.fixed_depth is None else row.fixed_depth
    best = max(range(len(row.offers)), key=lambda i: (sum(row.offers[i][:num]), -i))
    return best, min(num, len(row.offers[best]))
