"""The depth controller that judges each draft by itself: for CPUs, and models that skip padding.

The head says by how much it prefers each draft to the second best token, and a lookup how many tokens match.
Records of both turn this into chances (confidence.py). A draft is fed if its chance is worth its cost
(draft_choice.py).
Every row may feed another number of drafts.

How many drafts the head makes is decided before they are known, by what its drafts have brought lately: as
many as let the rows wait least for their next token. If none does, the head is paused, for all rows at once:
a row that goes on after a pause has to feed the head what it missed. Paused rows are probed: texts change.
Pure Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import starmap

from outrider.request import MAX_DEPTH
from outrider.speculate.acceptance import ModelAcceptance, RowAcceptance
from outrider.speculate.confidence import HeadYield
from outrider.speculate.controller import DepthController, DraftRequest, Offer, RowOffer, chances_of
from outrider.speculate.costs import NEWEST_SHARE, CostTable, StepShape, guessed_costs
from outrider.speculate.depth import DepthChoice
from outrider.speculate.draft_choice import RowOffers, StepCost, choose_drafts
from outrider.speculate.prompt_costs import MeasuredPromptCosts

# Of a token's cost: with more, rows share their width. Margins on such machines cost 5 % in the ablation.
MAX_PADDING_SHARE = 0.5
# Plain steps that rows wait for a token: else the head does not draft. From the ablation: 0.98 costs 0.2 % of
# the mean answer and 0.4 % in the worst case; 0.92 costs 0.4 % of the last answer.
MAX_WAIT = 0.96
# How often the wait of a row with a fixed depth counts: it only loses by the drafts of the others, and ends
# last. Real bursts of mixed requests, a third of them without drafts, auto / off with 1 and with 3: 0.90 and
# 0.99 with 4 rows, 0.96 and 1.01 with 8.
OTHERS_WEIGHT = 3
# Among up to so many rows a draft has to bring its cost; among n rows beyond them, n / 8 of it. Rows that end
# early leave the reads of weights to the others, and many rows gain less than the last one loses. Real bursts
# of 16 rows, auto / off by the last and the mean answer: mixed requests 0.92, 0.93 -> 0.98, 0.99, chat 0.95,
# 1.00 -> 0.95, 0.95, code 0.98, 1.01 -> 1.04, 1.02.
MAX_ROWS_AT_COST = 8
# The same for lookups: they serve few rows at a time, while all wait longer. Real greedy bursts of 8 rows,
# auto / off by the last answer with 8 and with 4: chat 0.954 and 0.970 (64 tokens), 0.985 and 1.000 (200),
# programs 0.983 and 0.981, 0.997 and 1.025.
MAX_ROWS_OF_LOOKUPS = 4
# Steps between two probes while the head is paused. A probe of two rows takes about half of a plain step of
# 8 rows, as heads have to catch up: one in 64 steps takes 1 %. From the ablation: 32 costs 0.6 %. 128 gains
# 0.2 % in bursts, but heads come back later.
PROBE_INTERVAL, NUM_PROBE_ROWS = 64, 2
# Steps between two lookups while the head is paused and only long matches pay: a match that lasts is found a
# little later. Real bursts of 8 sampled chats whose head never drafts: 0.963 of drafts off with 1.
LOOKUP_INTERVAL = 4


def new_controller(
    costs: CostTable | None,
    acceptance: ModelAcceptance | None,
    overlaps_steps: bool,
    prompts: MeasuredPromptCosts | None = None,
    copied_bytes: int = 0,
) -> DepthController:
    """The controller for a device and a model.

    Where steps overlap, drafts are fed before the host has seen them. Where padding costs as much as tokens,
    all rows pay for the widest one. In both cases only the number of drafts matters, not which.
    `copied_bytes`: see PromptCosts.
    """
    costs = costs or CostTable(guessed_costs(), in_seconds=False)
    if overlaps_steps or costs.measured.padding_share > MAX_PADDING_SHARE:
        return DepthController(costs, acceptance, overlaps_steps, prompts, copied_bytes)
    return PerDraftController(costs, acceptance, prompts, copied_bytes)


@dataclass(frozen=True, slots=True)
class _Prices:
    token_s: float  # seconds that one more token of a row on auto is worth
    feed_s: float  # seconds that a step takes longer if one more draft is fed

    @property
    def min_chance(self) -> float:
        """The least chance of a draft that is worth feeding."""
        return self.feed_s / self.token_s


@dataclass(slots=True)
class _Pace:
    """Running means over the last steps."""

    tokens: float = 1.0  # of a row on auto
    stretch: float = 1.0  # the step's time in plain steps

    def count(self, tokens: float, stretch: float) -> None:
        self.tokens += NEWEST_SHARE * (tokens - self.tokens)
        self.stretch += NEWEST_SHARE * (stretch - self.stretch)


class PerDraftController(DepthController):
    probe_interval = PROBE_INTERVAL
    num_probe_rows = NUM_PROBE_ROWS
    looks_ahead = True  # a head that is paused and goes on again and again has to catch up each time

    def __init__(
        self,
        costs: CostTable | None = None,
        acceptance: ModelAcceptance | None = None,
        prompts: MeasuredPromptCosts | None = None,
        copied_bytes: int = 0,
    ) -> None:
        super().__init__(costs, acceptance, prompts=prompts, copied_bytes=copied_bytes)
        self._paces: dict[int, _Pace] = {}  # by number of decoding rows
        # The rows of the step that paused the head, and how many of them decoded; None: the head drafts.
        self._paused: tuple[list[RowAcceptance], int] | None = None
        self._paused_min_chance = 0.0  # least chance of a draft that is worth feeding to the rows that decode
        self._paused_lookup_chance = 0.0  # the same of a lookup
        self._steps_paused = 0  # since that step

    @property
    def drafts_may_pay(self) -> bool:
        return self._paused is None or self._paused_min_chance < 1

    def asks_host_drafters(self, record: RowAcceptance) -> bool:
        if self._paused is None:
            return True
        if self._paused_lookup_chance >= 1:
            return False
        short_match = self.acceptance.confidence["ngram"].chances(record.is_sampled)[0]
        return short_match >= self._paused_lookup_chance or self._steps_paused % LOOKUP_INTERVAL == 0

    def stays_paused(
        self, rows: Sequence[RowAcceptance], num_decoding: int, offers: Sequence[RowOffer]
    ) -> bool:
        """Costs change too: `choose` decides again after as many steps as there are between two probes."""
        paused, is_due = self._paused, self._steps_paused >= self.probe_interval
        if paused is None or is_due or any(starmap(self._may_pay, offers)):
            return False
        if (rows, num_decoding) != paused:
            has_grown = num_decoding >= paused[1] and rows[: len(paused[0])] == paused[0]
            if self.drafts_may_pay or not has_grown:
                return False
            paused = self._paused = [*rows], num_decoding  # on CPUs drafts pay even less beside more rows
        self._pace_of(num_decoding).count(1.0, 1.0)
        self._steps_paused += 1
        self._steps_since_probe += 1
        for record in rows[:num_decoding]:
            record.steps_since_head += 1
        return True

    def _may_pay(self, record: RowAcceptance, offer: Offer) -> bool:
        if offer.source == "head" or offer.num_certain:
            return True
        is_lookup = offer.source == "ngram"
        least = self._paused_lookup_chance if is_lookup else self._paused_min_chance
        return self._chances(record, offer)[0] >= least

    def choose(self, requests: Sequence[DraftRequest], num_cells: int, num_slots: int = 0) -> DepthChoice:
        decoding = [request for request in requests if not request.joins]
        cost = self._step_cost(decoding, num_cells)
        prices = self._prices(decoding, cost)
        rows = [self._offers(request, len(decoding)) for request in decoding]
        for request, row in zip(decoding, rows, strict=True):
            self._count_yield(request, row, prices)
        fed = choose_drafts(rows, cost, prices.token_s, prices.min_chance)
        self._paused_min_chance = prices.min_chance
        self._paused_lookup_chance = prices.min_chance / _lookup_worth(len(decoding))
        if len(decoding) < len(requests):
            cost_of_all = self._step_cost(requests, num_cells)
            depth, drafting = self._next_drafts(requests, self._prices(requests, cost_of_all), cost_of_all)
        else:
            depth, drafting = self._next_drafts(requests, prices, cost)
        self._count_step(rows, fed, cost, self._head_s(requests, len(drafting), depth))
        of_decoding = iter(fed)
        feed = tuple((0, 0) if request.joins else next(of_decoding) for request in requests)
        return DepthChoice(feed, self._num_drafts_next(requests, depth, drafting))

    def _num_drafts_next(
        self, requests: Sequence[DraftRequest], depth: int, drafting: Sequence[int]
    ) -> tuple[int, ...]:
        """Drafts that the head makes for each row: `depth` for the rows on auto in `drafting`."""
        wanted = (depth if i in drafting else r.fixed_depth or 0 for i, r in enumerate(requests))
        return tuple(min(num, r.max_drafts_next) for num, r in zip(wanted, requests, strict=True))

    # -- drafts that are fed -----------------------------------------------------------------------------

    def _step_cost(self, rows: Sequence[DraftRequest], num_cells: int) -> StepCost:
        costs, num_rows = self.costs, max(1, len(rows))
        num_sampled = sum(request.record.is_sampled for request in rows)
        host_s = [costs.host_part_s(has_drafts) for has_drafts in (False, True)]

        @cache
        def cost(num_tokens: float, width: int) -> float:
            mean_width = costs.mean_width(num_rows, num_tokens, width)
            return host_s[num_tokens > num_rows] + costs.step_without_head_s(
                num_rows, mean_width, num_cells, num_sampled
            )

        return cost

    def _prices(self, decoding: Sequence[DraftRequest], cost: StepCost) -> _Prices:
        """What tokens are worth and cost now.

        The rows' waits for their next tokens sum to step_s * (auto rows / tokens + others), where the others
        have a fixed depth, and count OTHERS_WEIGHT times. A token is worth the time by which the step may get
        longer for it without changing this sum; among many rows, a part of it.
        """
        num_rows = max(1, len(decoding))
        num_auto = sum(request.fixed_depth is None for request in decoding) or 1
        num_others = OTHERS_WEIGHT * (num_rows - num_auto)
        pace = self._pace_of(len(decoding))
        plain_s, tokens = cost(num_rows, 1), pace.tokens
        token_s = plain_s * pace.stretch / (tokens * num_auto + tokens**2 * num_others)
        token_s /= max(1.0, num_rows / MAX_ROWS_AT_COST)
        return _Prices(token_s, max(0.0, cost(2 * num_rows, 2) - plain_s) / num_rows)

    def _offers(self, request: DraftRequest, num_rows: int) -> RowOffers:
        offers = [self._chances(request.record, offer) for offer in request.offers]
        worths = [
            _lookup_worth(num_rows) if offer.source == "ngram" and not offer.num_certain else 1.0
            for offer in request.offers
        ]
        return RowOffers(offers, request.fixed_depth, worths)

    def _chances(self, record: RowAcceptance, offer: Offer) -> list[float]:
        if not offer.confidence:
            return chances_of(record, offer)
        known = self.acceptance.confidence[offer.source]
        of_others = known.all_right(offer.confidence[offer.num_certain :], record.is_sampled)
        return [1.0] * offer.num_certain + of_others

    def _count_step(
        self, rows: Sequence[RowOffers], fed: Sequence[tuple[int, int]], cost: StepCost, head_s: float
    ) -> None:
        auto = [
            sum(row.offers[which][:num]) if num else 0.0
            for row, (which, num) in zip(rows, fed, strict=True)
            if row.fixed_depth is None
        ]
        if auto:
            nums = [num for _, num in fed]
            step_s = cost(len(rows) + sum(nums), 1 + max(nums)) + head_s
            self._pace_of(len(rows)).count(1 + sum(auto) / len(auto), step_s / cost(len(rows), 1))

    def _pace_of(self, num_rows: int) -> _Pace:
        """Steps of few rows bring more tokens: what they bring says little about steps of more rows."""
        return self._paces.setdefault(num_rows, _Pace())

    # -- drafts that the head makes ----------------------------------------------------------------------

    def _head_s(self, requests: Sequence[DraftRequest], num_rows: int, num_drafts: int) -> float:
        return self.costs.head_s(StepShape(max(1, len(requests)), 1, num_rows, num_drafts))

    def _next_drafts(
        self, requests: Sequence[DraftRequest], prices: _Prices, cost: StepCost
    ) -> tuple[int, list[int]]:
        """How many drafts the head makes in this step, and for which rows on auto."""
        rows = [i for i, r in enumerate(requests) if r.fixed_depth is None and r.max_drafts_next > 0]
        best, best_wait, before = 0, MAX_WAIT, math.inf
        for depth, wait in enumerate(self._waits(requests, rows, prices, cost), 1):
            if wait > before:
                break  # waits fall to the best depth, and rise from there on
            before = wait
            if wait < best_wait:
                best, best_wait = depth, wait
        drafting = rows if best else []
        num_decoding = sum(not request.joins for request in requests)
        self._paused = None if best else ([request.record for request in requests], num_decoding)
        self._steps_paused = 0
        return max(1, best), drafting + self.rows_to_probe(requests, drafting)

    def _waits(
        self, requests: Sequence[DraftRequest], rows: Sequence[int], prices: _Prices, cost: StepCost
    ) -> Iterator[float]:
        """Plain steps until a row's next token, on average, if the head makes 1, 2, .. drafts for `rows`."""
        num_rows = max(1, len(requests))  # in the next step the rows that join now decode too
        plain_s = cost(num_rows, 1)
        yields = [self._head_yield(requests[i].record, prices) for i in rows]
        num_fixed = sum(request.fixed_depth is not None for request in requests)
        num_others = len(requests) - len(rows) + (OTHERS_WEIGHT - 1) * num_fixed
        catch_up_s = self.costs.measured.missed_cell_s * sum(requests[i].head_lag for i in rows)
        tokens, num_fed = [1.0] * len(rows), 0.0
        for depth in range(1, MAX_DEPTH + 1):
            tokens = [num + one.tokens[depth - 1] for num, one in zip(tokens, yields, strict=True)]
            num_fed += sum(one.fed[depth - 1] for one in yields)
            # By the cost of the whole step: further drafts may cost more than the first one.
            num_tokens = num_rows + min(num_fed, num_rows * depth)  # the sum may be rounded up
            head_s = self._head_s(requests, len(rows), depth)
            step_s = cost(num_tokens, 1 + depth) + head_s
            steps_per_token = sum(1 / num for num in tokens) + num_others
            wait = step_s / plain_s * steps_per_token / max(1, len(rows) + num_others)
            if catch_up_s:  # the first of the tokens that are left comes with the step that feeds the head
                first_wait = 1 + (head_s + catch_up_s) / plain_s
                wait += (first_wait - wait) / self._num_left([requests[i] for i in rows], tokens)
            yield wait

    def _num_left(self, requests: Sequence[DraftRequest], tokens: Sequence[float]) -> float:
        """Tokens that a row still gets at this pace, on average: for some time, as texts change."""
        pairs = zip(requests, tokens, strict=True)
        return sum(min(r.num_left, self.probe_interval * num) for r, num in pairs) / len(requests)

    def _head_yield(self, record: RowAcceptance, prices: _Prices) -> HeadYield:
        if record.head_yield is None or record.head_yield.num_steps == 0:  # prices may have changed since
            known = self.acceptance.confidence["head"]
            record.head_yield = known.expected_yield(prices.min_chance, MAX_DEPTH, record.is_sampled)
        return record.head_yield

    def _count_yield(self, request: DraftRequest, row: RowOffers, prices: _Prices) -> None:
        """Count what each of the head's drafts brings in this step."""
        min_chance = prices.min_chance
        for offer, made in zip(request.offers, row.offers, strict=True):
            if offer.source != "head":
                continue
            known, chances = self._head_yield(request.record, prices), list(made)
            while len(chances) < MAX_DEPTH:  # drafts that were not made
                chances.append(chances[-1] * self.acceptance.confidence["head"].mean_chance)
            share = max(NEWEST_SHARE, 1 / (2 + known.num_steps))  # the first estimate counts once
            known.num_steps += 1
            for i, chance in enumerate(chances[:MAX_DEPTH]):
                is_fed = chance >= min_chance
                known.tokens[i] += share * (chance * is_fed - known.tokens[i])
                known.fed[i] += share * (is_fed - known.fed[i])


def _lookup_worth(num_rows: int) -> float:
    """Of a token that is looked up among so many decoding rows, as a share of what other tokens are worth."""
    return min(1.0, MAX_ROWS_OF_LOOKUPS / min(max(1, num_rows), MAX_ROWS_AT_COST))
