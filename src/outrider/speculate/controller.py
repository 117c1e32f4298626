"""The depth controller: what the costs and the rows' records say about the next step. Pure Python, no clock.

Holds the machine's costs and the model's record. Everything about a row is in the row's own record; the
decision itself is `depth.choose`.

While the head makes no drafts for a row it is paused: its hidden states are stored, and the head is fed them
in one pass when it is wanted again. Now and then it makes one draft that is compared and not fed: a probe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.request import MAX_DEPTH, SamplingParams
from outrider.speculate.acceptance import ModelAcceptance, RowAcceptance, Source
from outrider.speculate.costs import CostTable, StepShape, guessed_costs
from outrider.speculate.depth import Choice, RowOutlook, StepCost, best_steady, choose
from outrider.speculate.shapes import Shapes

PROBE_SHARE = 0.01  # of the time, for trying the head where nobody drafts with it
CATCHING_UP = 2.0  # what a trial costs, with feeding the head what it has missed, over one without
LEAST_PAUSE, MOST_PAUSE = 6, 16  # steps between two such trials
FAR = 0.9  # from paying: with less of a promise a trial is as seldom as it may be
MOST_SOON = 3  # after so many that were right nothing new is learnt: drafts do not pay all the same
NUM_PROBE_ROWS = 3  # rows that are tried while the whole batch rests; the others' states are not even fed
IDEAL = [0.97**place for place in range(1, MAX_DEPTH + 1)]  # chances of drafts that are nearly always right
OTHER_GAIN = 0.1  # how fast a row's share of other drafters follows what they offer
LEAST_OTHER = 0.02


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a row asks of the controller for one step."""

    record: RowAcceptance
    offers: Sequence[tuple[Source, int, int]]  # source, number of drafts, how many of them are certain
    fixed: int | None  # the depth that the request asked for; None: auto
    most_next: int  # drafts from the head that its next step could feed; 0: the head does not follow
    behind: int = 0  # cells of the row that the head has still to be fed
    joins: bool = False  # it decodes from the next step on
    others: Sequence[tuple[Source, int, int]] = ()  # offers beside the head's that nobody waits for


class DepthController:
    def __init__(
        self,
        costs: CostTable | None = None,
        acceptance: ModelAcceptance | None = None,
        few_shapes: bool = False,
    ) -> None:
        """`few_shapes`: a new shape is slow to begin with on this device."""
        self.costs = costs or CostTable(guessed_costs())
        self.acceptance = acceptance or ModelAcceptance()
        self.shapes = Shapes(self.costs, few_shapes)
        self._could: tuple[int, tuple[int, ...]] = (-1, ())  # when, and of which rows, that was last asked
        self._can_pay = False
        self._is_far = False  # whether drafts seemed far from paying when heads were last thought of
        self._since_probe = 0  # steps in which all rested
        self._num_soon = 0  # trials, one after the other, that came after one that was right
        self._at_trial = (0, 0)  # trials, and misses among them, before the last one

    def new_record(self, params: SamplingParams) -> RowAcceptance:
        return RowAcceptance(self.acceptance, params)

    def choose(self, requests: Sequence[DraftRequest], num_cells: int, num_slots: int = 0) -> Choice:
        """Depths for the rows of a step, and for those that join them in the step after it.

        Rows of up to `num_cells`, in caches that have `num_slots`.
        """
        rows = [_outlook(request) for request in requests]
        for request in requests:
            request.record.on_trial = False
        drafting = sum(request.most_next > 0 for request in requests)
        now, later = max(1, sum(not request.joins for request in requests)), len(rows)
        drawing = sum(request.record.draws for request in requests)
        costs = self.costs

        def cost(num_rows: int, num_heading: int, width: int, depth: int) -> float:
            rows, wide = self.shapes.decoding(num_rows, width, num_cells, num_slots)
            heads = num_heading if depth else 0
            return costs.step_s(StepShape(rows, wide, heads, depth, num_cells, min(drawing, num_rows)))

        def cost_next(width: int, depth: int) -> float:
            return cost(later, drafting, width, depth)

        choice = choose(
            rows,
            lambda width, depth: cost(now, min(now, drafting), width, depth),
            cost_next,
            lambda depth: costs.head_row_s(later, max(1, drafting), depth),
            self.shapes.depths,
            self.shapes.another,
        )
        if drafting == 0 or not (any(choice.next) or self._could_pay(rows, cost_next)):
            return choice
        return self._with_probes(choice, requests)

    def _could_pay(self, rows: Sequence[RowOutlook], cost: StepCost) -> bool:
        """Whether these rows would draft, were drafts nearly always right; else no head has to be tried."""
        asked = tuple(MAX_DEPTH if row.fixed is None else row.fixed for row in rows)
        if self._could != (self.costs.version, asked):
            ideal = [RowOutlook((), row.fixed, IDEAL[: len(row.from_head)]) for row in rows]
            self._could = self.costs.version, asked
            self._can_pay = best_steady(ideal, cost, self.shapes.depths).depth > 0
        return self._can_pay

    def _with_probes(self, choice: Choice, requests: Sequence[DraftRequest]) -> Choice:
        """Let the head make a draft for rows that have long been without one; while all rest, for a few."""
        all_rest = not any(choice.next)
        self._is_far = choice.promise < FAR
        pause = self.pause(len(requests))
        for request, depth in zip(requests, choice.next, strict=True):
            request.record.note_head(depth > 0, all_rest)
        self._since_probe = self._since_probe + 1 if all_rest else 0
        if all_rest:  # at once: a step with a trial costs, more rows in it hardly do
            due = _warmest(requests) if self._since_probe >= self._next_pause(pause) else []
        else:
            due = [
                i
                for i, request in enumerate(requests)
                if _may_probe(request) and request.record.since_head >= pause
            ]
        if not due:
            return choice
        self._num_soon = self._num_soon + 1 if all_rest and self._has_hit() else 0
        self._since_probe, self._at_trial = 0, (self.acceptance.num_trials, self.acceptance.num_missed)
        for i in due:
            requests[i].record.since_head, requests[i].record.on_trial = 0, True
        depths = tuple(1 if i in due else depth for i, depth in enumerate(choice.next))
        return replace(choice, next=depths)

    def would_wait(self, requests: Sequence[DraftRequest]) -> bool:
        """Whether what others than the head are likely to offer is worth reading a step before the next is
        launched: then the device waits for the host."""
        gained = tokens = 0.0
        for request in requests:
            record = request.record
            from_head = sum(record.chances("head", request.most_next)) if request.most_next > 0 else 0.0
            tokens += 1 + from_head
            if record.other is not None and record.other_share >= LEAST_OTHER:
                more = sum(record.chances(record.other, MAX_DEPTH)) - from_head
                gained += record.other_share * max(0.0, more)
        return gained > self.costs.host_share * tokens

    def is_probe_near(self, resting: Sequence[DraftRequest], num_rows: int) -> bool:
        """Whether, of the rows that rest, the next `choose` may let the head try one."""
        pause = self.pause(num_rows)
        if len(resting) == num_rows:
            return self._since_probe + 1 >= self._next_pause(pause) and bool(_warmest(resting))
        return any(_may_probe(request) and request.record.since_head + 1 >= pause for request in resting)

    def _next_pause(self, pause: int) -> int:
        """Where the last trial was right throughout, the next one comes soon; but not for ever."""
        return LEAST_PAUSE if self._has_hit() and self._num_soon < MOST_SOON else pause

    def _has_hit(self) -> bool:
        num_trials, num_missed = self._at_trial
        return self.acceptance.num_trials > num_trials and self.acceptance.num_missed == num_missed

    def pause(self, num_rows: int) -> int:
        """Steps between two trials of the head, so that they take no more than their share of the time."""
        if self._is_far:
            return MOST_PAUSE
        step_s = self.costs.step_s(StepShape(num_rows, 1))
        trial_s = self.costs.head_s(StepShape(num_rows, 1, min(num_rows, NUM_PROBE_ROWS), 1))
        return min(MOST_PAUSE, max(LEAST_PAUSE, round(CATCHING_UP * trial_s / (PROBE_SHARE * step_s))))


def _may_probe(request: DraftRequest) -> bool:
    return request.fixed is None and request.most_next > 0


def _warmest(requests: Sequence[DraftRequest]) -> list[int]:
    """The rows that are tried while all rest: those whose heads have missed least."""
    following = (i for i, request in enumerate(requests) if _may_probe(request))
    return sorted(following, key=lambda i: (requests[i].behind, i))[:NUM_PROBE_ROWS]


def _outlook(request: DraftRequest) -> RowOutlook:
    record = request.record
    on_trial = record.on_trial
    offers = [[] if on_trial and offer[0] == "head" else _chances(record, *offer) for offer in request.offers]
    from_head: Sequence[float] = ()
    if request.most_next > 0:
        from_head = record.chances("head", min(MAX_DEPTH, request.most_next))
    _note_others(request, offers, from_head)
    share = record.other_share
    drafts = 0 if on_trial else max((num for source, num, _ in request.offers if source == "head"), default=0)
    if request.fixed is not None or share < LEAST_OTHER or record.other is None:
        return RowOutlook(offers, request.fixed, from_head, drafts=drafts)
    otherwise = [share * chance for chance in record.chances(record.other, MAX_DEPTH)]
    return RowOutlook(offers, None, [(1 - share) * chance for chance in from_head], otherwise, drafts)


def _note_others(
    request: DraftRequest, offers: Sequence[Sequence[float]], from_head: Sequence[float]
) -> None:
    """How often, lately, a drafter other than the head offered more than the head is worth."""
    record, best, best_worth = request.record, None, sum(from_head)
    known = [*zip(request.offers, offers, strict=True), *((o, _chances(record, *o)) for o in request.others)]
    for (source, _, _), chances in known:
        if source != "head" and sum(chances) >= best_worth:
            best, best_worth = source, sum(chances)
    record.other = best or record.other
    record.other_share += OTHER_GAIN * ((best is not None) - record.other_share)


def _chances(record: RowAcceptance, source: Source, num: int, num_sure: int) -> list[float]:
    """That drafts 1..j all stand, where the first few are certain."""
    chances = record.chances(source, num)
    if not 0 < num_sure <= num:
        return chances
    return [1.0 if j < num_sure else chances[j] / chances[num_sure - 1] for j in range(num)]
