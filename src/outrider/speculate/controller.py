"""The depth controller: decides in every step how many drafts each row feeds and how many the head makes.

Owns the costs of the machine, the acceptance record of the model, and when paused heads are probed.
Everything about a single row is in the row's `RowAcceptance`. The decision itself is the pure function
`depth.choose`. Pure Python, no clock.

Paused head: while the head makes no drafts for a row, the row's hidden states are stored, and the head is
fed them in one pass when it drafts again. Probe: now and then a paused head makes one draft that is compared
with the committed token and never fed to the trunk. Probes show when drafting has become worth its cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from outrider.request import MAX_DEPTH, SamplingParams
from outrider.speculate.acceptance import ModelAcceptance, RowAcceptance, Source
from outrider.speculate.costs import CostTable, StepShape, guessed_costs
from outrider.speculate.depth import DepthChoice, RowForecast, StepCost, best_depth, choose
from outrider.speculate.shapes import ShapePolicy

# Share of the time that probes may take. Where drafts do not pay, auto may cost 3 % in all (docs/LOG.md,
# "Feeding a head nobody uses").
PROBE_TIME_SHARE = 0.01
CATCH_UP_FACTOR = 2.0  # cost of a probe in drafts: the head catches up first (docs/LOG.md, "Probes in turns")
# Steps between two probes. The simulator requires that drafting comes back within 32 steps: two probes.
MIN_PROBE_INTERVAL, MAX_PROBE_INTERVAL = 6, 16
PROBE_RARELY_BELOW = 0.9  # expected speed-up under which probes have MAX_PROBE_INTERVAL; from the simulator
# Probes in a row that follow a right probe after MIN_PROBE_INTERVAL steps. If drafts do not pay after so many
# right ones, more of them show nothing new (docs/LOG.md, "Heads that were right").
MAX_QUICK_PROBES = 3
NUM_PROBE_ROWS = 3  # rows that are probed while the head drafts for no row; chosen by hand
# Drafts that are nearly always right: a head that does not pay with these is not probed. Chosen by hand.
BEST_CASE_CHANCES = [0.97**num for num in range(1, MAX_DEPTH + 1)]
OTHER_SHARE_GAIN = 0.1  # weight of the newest step in `RowAcceptance.other_share`; chosen by hand
MIN_OTHER_SHARE = 0.02  # under this share other drafters are left out of the forecast; chosen by hand


class Offer(NamedTuple):
    """Drafts that a row could feed in this step."""

    source: Source
    num_drafts: int
    num_certain: int = 0  # the first so many drafts are forced by a grammar


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A row's request to the controller for one step."""

    record: RowAcceptance
    offers: Sequence[Offer]
    fixed_depth: int | None  # the depth that the request sets; None: auto
    max_drafts_next: int  # the most drafts that the head may make for the next step; 0: no head for this row
    head_lag: int = 0  # cells of the row that the head has not been fed
    joins: bool = False  # the row prefills in this step and decodes from the next one on
    other_offers: Sequence[Offer] = ()  # offers of other drafters that are known too late to be fed


class DepthController:
    """Called by engine/draft_planner.py. In every step, in this order:

    1. `new_record`, once for a row's life: the acceptance record that its requests carry.
    2. `should_wait_for_lookup` and `may_probe_next`, only before an overlapped step: whether the step in
       flight has to be read before the next one is planned.
    3. `choose`: the drafts that every row feeds, and `num_drafts_next` for every row. Probes are added here.
    4. `shapes.count_step` and `shapes.decode_shape`: the shape of the pass.
    5. After the step `costs.observe` learns its time, and `RowAcceptance.compare` the fate of its drafts.
    """

    def __init__(
        self,
        costs: CostTable | None = None,
        acceptance: ModelAcceptance | None = None,
        few_shapes: bool = False,
    ) -> None:
        """`few_shapes`: passes are traced on this device, so new shapes are slow at first."""
        self.costs = costs or CostTable(guessed_costs())
        self.acceptance = acceptance or ModelAcceptance()
        self.shapes = ShapePolicy(self.costs, few_shapes)
        self._can_pay = False  # the cached answer of _could_pay
        self._can_pay_key: tuple[int, tuple[int, ...]] = (-1, ())  # version of the costs, depths of the rows
        self._is_far_from_paying = False  # as of the last step with a head
        self._steps_since_probe = 0  # steps in which the head drafted for no row
        self._num_quick_probes = 0
        self._counts_at_probe = (0, 0)  # comparisons and misses of the head before the last probe

    def new_record(self, params: SamplingParams) -> RowAcceptance:
        return RowAcceptance(self.acceptance, params)

    def choose(self, requests: Sequence[DraftRequest], num_cells: int, num_slots: int = 0) -> DepthChoice:
        """Depths for the rows of a step and for the rows that join them in the next step.

        `num_cells`: cells of the longest row. `num_slots`: slots of the caches.
        """
        rows = [_forecast(request) for request in requests]
        for request in requests:
            request.record.is_probe = False
        num_head_rows = sum(request.max_drafts_next > 0 for request in requests)
        num_rows_now = max(1, sum(not request.joins for request in requests))
        num_rows_next = len(rows)
        num_sampled = sum(request.record.is_sampled for request in requests)
        costs = self.costs

        def cost(num_rows: int, width: int, num_drafts_next: int) -> float:
            padded_rows, padded_width = self.shapes.decode_shape(num_rows, width, num_cells, num_slots)
            head_rows = min(num_rows, num_head_rows) if num_drafts_next else 0
            sampled = min(num_sampled, num_rows)
            return costs.step_s(
                StepShape(padded_rows, padded_width, head_rows, num_drafts_next, num_cells, sampled)
            )

        def cost_next(width: int, num_drafts_next: int) -> float:
            return cost(num_rows_next, width, num_drafts_next)

        choice = choose(
            rows,
            lambda width, num_drafts_next: cost(num_rows_now, width, num_drafts_next),
            cost_next,
            lambda depth: costs.head_row_s(num_rows_next, max(1, num_head_rows), depth),
            self.shapes.depths,
            self.shapes.min_depth_gain,
        )
        if num_head_rows == 0 or not (any(choice.num_drafts_next) or self._could_pay(rows, cost_next)):
            return choice
        return self._with_probes(choice, requests)

    def _could_pay(self, rows: Sequence[RowForecast], cost: StepCost) -> bool:
        """True if these rows would draft if drafts were nearly always right. Else no probe is needed."""
        depths = tuple(MAX_DEPTH if row.fixed_depth is None else row.fixed_depth for row in rows)
        if self._can_pay_key != (self.costs.version, depths):
            best_case = [
                RowForecast((), row.fixed_depth, BEST_CASE_CHANCES[: len(row.head_chances)]) for row in rows
            ]
            self._can_pay_key = self.costs.version, depths
            self._can_pay = best_depth(best_case, cost, self.shapes.depths).depth > 0
        return self._can_pay

    # -- probes ------------------------------------------------------------------------------------------

    def _with_probes(self, choice: DepthChoice, requests: Sequence[DraftRequest]) -> DepthChoice:
        """Let the head make one draft for rows that it has long not drafted for."""
        is_head_idle = not any(choice.num_drafts_next)
        self._is_far_from_paying = choice.expected_speedup < PROBE_RARELY_BELOW
        interval = self.probe_interval(len(requests))
        for request, num in zip(requests, choice.num_drafts_next, strict=True):
            request.record.count_step(num > 0, is_head_idle)
        self._steps_since_probe = self._steps_since_probe + 1 if is_head_idle else 0
        if is_head_idle:  # several rows at once: a step with a probe is longer, more rows in it hardly matter
            is_due = self._steps_since_probe >= self._idle_interval(interval)
            due = _rows_to_probe(requests) if is_due else []
        else:
            due = [i for i, request in enumerate(requests) if _is_probe_due(request, interval)]
        if not due:
            return choice
        is_quick = is_head_idle and self._was_probe_right()
        self._num_quick_probes = self._num_quick_probes + 1 if is_quick else 0
        self._steps_since_probe = 0
        self._counts_at_probe = self.acceptance.num_head_comparisons, self.acceptance.num_head_misses
        for i in due:
            requests[i].record.steps_since_head, requests[i].record.is_probe = 0, True
        nums = tuple(1 if i in due else num for i, num in enumerate(choice.num_drafts_next))
        return replace(choice, num_drafts_next=nums)

    def may_probe_next(self, paused: Sequence[DraftRequest], num_rows: int) -> bool:
        """True if the next `choose` may probe one of the paused rows, of `num_rows` rows in all."""
        interval = self.probe_interval(num_rows)
        if len(paused) == num_rows:
            return self._steps_since_probe + 1 >= self._idle_interval(interval) and bool(
                _rows_to_probe(paused)
            )
        return any(_is_probe_due(request, interval - 1) for request in paused)

    def probe_interval(self, num_rows: int) -> int:
        """Steps between two probes, so that probes take PROBE_TIME_SHARE of the time."""
        if self._is_far_from_paying:
            return MAX_PROBE_INTERVAL
        step_s = self.costs.step_s(StepShape(num_rows, 1))
        probe_s = CATCH_UP_FACTOR * self.costs.head_s(
            StepShape(num_rows, 1, min(num_rows, NUM_PROBE_ROWS), num_drafts_next=1)
        )
        interval = round(probe_s / (PROBE_TIME_SHARE * step_s))
        return min(MAX_PROBE_INTERVAL, max(MIN_PROBE_INTERVAL, interval))

    def _idle_interval(self, interval: int) -> int:
        """Steps between two probes while the head drafts for no row: fewer after a probe that was right."""
        is_quick = self._was_probe_right() and self._num_quick_probes < MAX_QUICK_PROBES
        return MIN_PROBE_INTERVAL if is_quick else interval

    def _was_probe_right(self) -> bool:
        """True if the last probe was compared, for at least one row, and was right for all of them."""
        num_comparisons, num_misses = self._counts_at_probe
        is_compared = self.acceptance.num_head_comparisons > num_comparisons
        return is_compared and self.acceptance.num_head_misses == num_misses

    # -- overlapped steps --------------------------------------------------------------------------------

    def should_wait_for_lookup(self, requests: Sequence[DraftRequest]) -> bool:
        """True if a step should be read before the next launch, for the drafts that lookups may find in it.

        Waits if  expected tokens from lookups > share of time that the device then waits * expected tokens.
        """
        gained = tokens = 0.0
        for request in requests:
            record = request.record
            from_head = sum(record.chances("head", request.max_drafts_next))
            tokens += 1 + from_head
            if record.other_source is not None and record.other_share >= MIN_OTHER_SHARE:
                more = sum(record.chances(record.other_source, MAX_DEPTH)) - from_head
                gained += record.other_share * max(0.0, more)
        return gained > self.costs.host_share * tokens


def _is_probe_due(request: DraftRequest, interval: int) -> bool:
    return _may_probe(request) and request.record.steps_since_head >= interval


def _may_probe(request: DraftRequest) -> bool:
    return request.fixed_depth is None and request.max_drafts_next > 0


def _rows_to_probe(requests: Sequence[DraftRequest]) -> list[int]:
    """The rows that are probed while the head drafts for no row: those whose heads have least to catch up."""
    possible = (i for i, request in enumerate(requests) if _may_probe(request))
    return sorted(possible, key=lambda i: (requests[i].head_lag, i))[:NUM_PROBE_ROWS]


def _forecast(request: DraftRequest) -> RowForecast:
    """The row's forecast. Also updates how often, lately, other drafters offered more than the head."""
    record = request.record
    head_chances = record.chances("head", min(MAX_DEPTH, request.max_drafts_next))
    offers = [  # a probe is not fed
        [] if record.is_probe and offer.source == "head" else _chances(record, offer)
        for offer in request.offers
    ]
    others = [*zip(request.offers, offers, strict=True)]
    others += [(offer, _chances(record, offer)) for offer in request.other_offers]
    best, best_tokens = None, sum(head_chances)
    for offer, chances in others:
        if offer.source != "head" and sum(chances) >= best_tokens:
            best, best_tokens = offer.source, sum(chances)
    record.other_source = best or record.other_source
    record.other_share += OTHER_SHARE_GAIN * ((best is not None) - record.other_share)

    last_depth = 0
    if not record.is_probe:
        last_depth = max((offer.num_drafts for offer in request.offers if offer.source == "head"), default=0)
    share = record.other_share
    if request.fixed_depth is not None or share < MIN_OTHER_SHARE or record.other_source is None:
        return RowForecast(offers, request.fixed_depth, head_chances, last_depth=last_depth)
    other_chances = [share * chance for chance in record.chances(record.other_source, MAX_DEPTH)]
    head_chances = [(1 - share) * chance for chance in head_chances]
    return RowForecast(offers, None, head_chances, other_chances, last_depth)


def _chances(record: RowAcceptance, offer: Offer) -> list[float]:
    """For j = 1..num_drafts: the chance that drafts 1..j are all right, where the first few are certain."""
    chances = record.chances(offer.source, offer.num_drafts)
    num_certain = offer.num_certain
    if not 0 < num_certain <= offer.num_drafts:
        return chances
    return [
        1.0 if j < num_certain else chances[j] / chances[num_certain - 1] for j in range(offer.num_drafts)
    ]
