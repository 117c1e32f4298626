"""The depth controller: decides in every step how many drafts each row feeds and how many the head makes.

This one decides by how often drafts were accepted. It serves where a draft's own margin is of no use: where
steps overlap, and where all rows pay for the widest one. Elsewhere each draft is judged: per_draft.py.

Owns the costs of the machine, those of prompts too, and the acceptance record of the model. Everything about
a single row is in the row's `RowAcceptance`. The decision itself is the pure function `depth.choose`. Pure
Python, no clock.

Probe: now and then the head makes one draft for each row that it does not draft for. The draft is compared
with the committed token and never fed to the trunk. Probes show when drafting has become worth its cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from outrider.request import MAX_DEPTH, SamplingParams
from outrider.speculate.acceptance import ModelAcceptance, RowAcceptance, Source
from outrider.speculate.costs import CostTable, StepShape, guessed_costs
from outrider.speculate.depth import DepthChoice, RowForecast, choose
from outrider.speculate.prompt_costs import MeasuredPromptCosts, PromptCosts
from outrider.speculate.shapes import ShapePolicy

PROBE_INTERVAL = 16  # steps between two probes; from the simulator: drafting comes back within 32 steps
NUM_PROBE_ROWS = 3  # rows that are probed while the head drafts for no row; chosen by hand
MAX_INTERVALS = 4  # without a probe: then rows that are new are probed too; chosen by hand
OTHER_SHARE_GAIN = 0.1  # weight of the newest step in `RowAcceptance.other_share`; chosen by hand
MIN_OTHER_SHARE = 0.02  # under this share other drafters are left out of the forecast; chosen by hand


class Offer(NamedTuple):
    """Drafts that a row could feed in this step."""

    source: Source
    num_drafts: int
    num_certain: int = 0  # the first so many drafts are forced by a grammar
    confidence: Sequence[float] = ()  # of each draft (confidence.py); empty: its drafter says nothing


RowOffer = tuple[RowAcceptance, Offer]  # whose offer


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A row's request to the controller for one step."""

    record: RowAcceptance
    offers: Sequence[Offer]
    fixed_depth: int | None  # the depth that the request sets; None: auto
    max_drafts_next: int  # the most drafts that the head may make for the next step; 0: no head for this row
    head_lag: int = 0  # cells of the row that the head has not been fed
    joins: bool = False  # the row prefills, and decodes from the next step on, or soon
    other_offers: Sequence[Offer] = ()  # offers of other drafters that are known too late to be fed
    num_left: float = math.inf  # tokens that the row may still commit


class DepthController:
    """Called by engine/draft_planner.py. In every step, in this order:

    1. `new_record`, once for a row's life: the acceptance record that its requests carry.
    2. `should_wait_for_lookup`, only before an overlapped step: whether the step in flight has to be read
       before the next one is planned.
    3. `stays_paused`: whether no row drafts, for the same reasons as in the step before.
    4. If it does not, `choose`: the drafts that every row feeds, and `num_drafts_next` for every row. Probes
       are added here.
    5. `shapes.count_step` and `shapes.decode_shape`: the shape of the pass.
    6. After the step `costs.observe` learns its time, and `RowAcceptance.compare` the fate of its drafts.
    """

    probe_interval = PROBE_INTERVAL
    num_probe_rows = NUM_PROBE_ROWS
    looks_ahead = False  # rows whose prompts have to wait for their turn join too

    def __init__(
        self,
        costs: CostTable | None = None,
        acceptance: ModelAcceptance | None = None,
        few_shapes: bool = False,
        prompts: MeasuredPromptCosts | None = None,
        copied_bytes: int = 0,
    ) -> None:
        """`few_shapes`: passes are traced on this device, so new shapes are slow at first.

        `copied_bytes`: see PromptCosts.
        """
        self.costs = costs or CostTable(guessed_costs(), in_seconds=False)
        self.acceptance = acceptance or ModelAcceptance()
        self.shapes = ShapePolicy(self.costs, few_shapes)
        padding_share = self.costs.measured.padding_share
        self.prompt_costs = PromptCosts(prompts, padding_share, copied_bytes, self.shapes.prefill_width)
        self._steps_since_probe = 0  # steps in which the head drafted for no row

    @property
    def drafts_may_pay(self) -> bool:
        """False if not even a certain draft would be worth feeding, as far as the costs are known."""
        return True

    def asks_host_drafters(self, record: RowAcceptance) -> bool:
        """Whether drafts are looked up, beside the head's, for the next step of this row on auto."""
        return self.drafts_may_pay

    def new_record(self, params: SamplingParams) -> RowAcceptance:
        return RowAcceptance(self.acceptance, params)

    def stays_paused(
        self, rows: Sequence[RowAcceptance], num_decoding: int, offers: Sequence[RowOffer]
    ) -> bool:
        """True if no row feeds or makes drafts, as in the step before: then `choose` is not asked.

        `rows`: the records of the rows, those that join last.
        """
        return False

    def choose(self, requests: Sequence[DraftRequest], num_cells: int, num_slots: int = 0) -> DepthChoice:
        """Depths for the rows of a step and for the rows that join them in the next step, or soon.

        `num_cells`: cells of the longest row, or of the longest one that decodes. `num_slots`: slots of the
        caches.
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

        choice = choose(
            rows,
            lambda width, num_drafts_next: cost(num_rows_now, width, num_drafts_next),
            lambda width, num_drafts_next: cost(num_rows_next, width, num_drafts_next),
            lambda depth: costs.head_row_s(num_rows_next, max(1, num_head_rows), depth),
            self.shapes.depths,
            self.shapes.min_depth_gain,
        )
        return self._with_probes(choice, requests)

    def _with_probes(self, choice: DepthChoice, requests: Sequence[DraftRequest]) -> DepthChoice:
        """Now and then, let the head make one draft for the rows that it does not draft for."""
        nums = list(choice.num_drafts_next)
        is_head_idle = not any(nums)
        for request in requests:
            request.record.count_step(is_head_idle)
        for i in self.rows_to_probe(requests, [i for i, num in enumerate(nums) if num]):
            nums[i], requests[i].record.is_probe = 1, True
        return replace(choice, num_drafts_next=tuple(nums))

    def rows_to_probe(self, requests: Sequence[DraftRequest], drafting: Sequence[int]) -> list[int]:
        """The rows that are probed in this step. The head drafts for the rows `drafting`."""
        self._steps_since_probe = 0 if drafting else self._steps_since_probe + 1
        if not drafting and self._steps_since_probe < self.probe_interval:
            for request in requests:
                request.record.steps_since_head += not request.joins
            return []
        possible = (
            i
            for i, r in enumerate(requests)
            if r.fixed_depth is None and r.max_drafts_next > 0 and not r.joins
        )
        # Rows with short answers end before they have waited for an interval.
        is_late = self._steps_since_probe >= MAX_INTERVALS * self.probe_interval
        due = [
            i
            for i in possible
            if i not in drafting and (is_late or requests[i].record.steps_since_head >= self.probe_interval)
        ]
        if not drafting:  # a step with a probe takes longer: few rows, rarely
            due = sorted(due, key=lambda i: (requests[i].head_lag, i))[: self.num_probe_rows]
        due = due if self.drafts_may_pay else []
        if due:
            self._steps_since_probe = 0
        for i, request in enumerate(requests):
            has_drafts = i in drafting or i in due
            if has_drafts:
                request.record.steps_since_head = 0
            else:
                request.record.steps_since_head += not request.joins
        return due

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


def _forecast(request: DraftRequest) -> RowForecast:
    """The row's forecast. Also updates how often, lately, other drafters offered more than the head."""
    record = request.record
    head_chances = record.chances("head", min(MAX_DEPTH, request.max_drafts_next))
    offers = [  # a probe is not fed
        [] if record.is_probe and offer.source == "head" else chances_of(record, offer)
        for offer in request.offers
    ]
    others = [*zip(request.offers, offers, strict=True)]
    others += [(offer, chances_of(record, offer)) for offer in request.other_offers]
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


def chances_of(record: RowAcceptance, offer: Offer) -> list[float]:
    """For j = 1..num_drafts: the chance that drafts 1..j are all right, where the first few are certain."""
    chances = record.chances(offer.source, offer.num_drafts)
    num_certain = offer.num_certain
    if not 0 < num_certain <= offer.num_drafts:
        return chances
    return [
        1.0 if j < num_certain else chances[j] / chances[num_certain - 1] for j in range(offer.num_drafts)
    ]
