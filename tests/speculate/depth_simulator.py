"""Replays recorded acceptance on a table of costs: the speed that a policy of depths would have had.

A trace holds, for every token of a real answer, how many of the head's 8 drafts after it were right, the
class of each one's margin, how many of an n-gram lookup's were right (None: it proposed nothing), and how
many tokens the lookup matched. So every depth can be replayed exactly. `python -m benchmarks.draft_traces`
records them.
"""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.request import MAX_DEPTH, SamplingParams
from outrider.speculate.acceptance import RowAcceptance, Source
from outrider.speculate.confidence import MARGINS
from outrider.speculate.controller import DepthController, DraftRequest, Offer
from outrider.speculate.costs import CostTable, HeadCost, MeasuredCosts, StepShape, interpolated
from outrider.speculate.depth import DepthChoice
from outrider.speculate.per_draft import PerDraftController, new_controller
from outrider.speculate.shapes import ALL_DEPTHS

WIDTHS = range(1, MAX_DEPTH + 2)
NUM_CELLS = 128


@dataclass(frozen=True)
class Trace:
    kind: str
    temperature: float
    head: tuple[int, ...]  # right drafts of 8, after each token
    ngram: tuple[int | None, ...]  # right drafts of 8; None: nothing proposed
    margins: tuple[tuple[float, ...], ...]  # of the 8 drafts of the head
    matches: tuple[int, ...] = ()  # tokens that the lookup matched; 0: nothing proposed

    def part(self, start: int, end: int | None = None) -> Trace:
        parts = (each[start:end] for each in (self.head, self.ngram, self.margins, self.matches))
        return Trace(self.kind, self.temperature, *parts)  # type: ignore[arg-type]

    def __add__(self, other: Trace) -> Trace:
        return Trace(
            self.kind,
            self.temperature,
            self.head + other.head,
            self.ngram + other.ngram,
            self.margins + other.margins,
            self.matches + other.matches,
        )


@functools.cache
def traces(kind: str | None = None, hot: bool | None = None) -> tuple[Trace, ...]:
    """The recorded traces: chat, code, json (greedy and at temperature 0.8), words (greedy and at 1.2)."""
    data = json.loads((Path(__file__).parent / "traces.json").read_text())
    made = [
        Trace(
            one["kind"],
            one["temperature"],
            tuple(map(int, one["head"])),
            tuple(None if c == "-" else int(c) for c in one["ngram"]),
            tuple(
                _margins(one["margins"][i : i + MAX_DEPTH]) for i in range(0, len(one["margins"]), MAX_DEPTH)
            ),
            tuple(0 if c == "-" else int(c, 16) for c in one["matches"]),
        )
        for one in data
    ]
    return tuple(
        t for t in made if kind in (None, t.kind) and hot in (None, t.temperature > 0) and len(t.head) >= 100
    )


def _margins(classes: str) -> tuple[float, ...]:
    """Margins of these classes."""
    return tuple((0.0, *MARGINS.limits)[int(c)] for c in classes)


def constant(num_right: int, length: int = 4000) -> Trace:
    """Text in which the first `num_right` drafts are always right, and their margins say so."""
    margins = _margins("8" * num_right + "1" * (MAX_DEPTH - num_right))
    return Trace("constant", 0.0, (num_right,) * length, (None,) * length, (margins,) * length)


def by_chance(share: float, seed: int, length: int = 4000) -> Trace:
    """Text in which every draft is right with the same chance, and margins say nothing."""
    numbers = random.Random(seed)

    def num_right() -> int:
        return next((i for i in range(MAX_DEPTH) if numbers.random() >= share), MAX_DEPTH)

    right = tuple(num_right() for _ in range(length))
    return Trace("by chance", 0.0, right, (None,) * length, (_margins("4" * 8),) * length)


class SimulatedRow:
    """A row that walks along its trace, over and over."""

    def __init__(self, trace: Trace, record: RowAcceptance, start: int = 0, drafts: bool = True) -> None:
        self.trace = trace
        self.record = record
        self.drafts = drafts  # False: the request asked for no drafts
        self.place = start
        self.end = math.inf  # place of its last token
        self.made = 0  # drafts that the head made for this step
        self.behind = 0  # tokens that the head has not been fed

    def request(self, offers: Sequence[Offer]) -> DraftRequest:
        left = max(0, self.end - self.place)
        if not self.drafts:
            return DraftRequest(self.record, offers, 0, 0, num_left=left)
        max_next = int(min(MAX_DEPTH, max(0, left - 2)))
        return DraftRequest(self.record, offers, None, max_next, self.behind, num_left=left)

    def offers(self, with_ngram: bool) -> list[Offer]:
        found: list[Offer] = []
        if self.made:
            found.append(Offer("head", self.made, confidence=self.margins[: self.made]))
        if with_ngram and self._right("ngram") is not None:
            match = self.trace.matches[self.place % len(self.trace.matches)]
            found.append(Offer("ngram", MAX_DEPTH, confidence=range(match, match + MAX_DEPTH)))
        return found

    @property
    def margins(self) -> tuple[float, ...]:
        return self.trace.margins[self.place % len(self.trace.margins)]

    def _right(self, source: Source) -> int | None:
        rights = self.trace.head if source == "head" else self.trace.ngram
        return rights[self.place % len(rights)]

    def advance(self, offers: Sequence[Offer], fed: tuple[int, int]) -> int:
        """Commit the accepted drafts and a bonus token. Record every proposal, fed or not."""
        source, num = (offers[fed[0]][0], fed[1]) if offers else ("head", 0)
        committed = 1 + min(num, self._right(source) or 0)
        for offer in offers:
            right = min(offer.num_drafts, committed, self._right(offer.source) or 0)
            self.record.add(offer.source, offer.num_drafts, right, committed, offer.confidence)
        self.place += committed
        return committed


@dataclass
class Outcome:
    """A run: for every step its depths, tokens and seconds."""

    steps: list[tuple[tuple[int, ...], int, float]]

    @property
    def pace(self) -> float:
        return self.pace_of(0, len(self.steps))

    def pace_of(self, start: int, end: int) -> float:
        part = self.steps[start:end]
        return sum(tokens for _, tokens, _ in part) / sum(seconds for _, _, seconds in part)

    def mean_depth(self, start: int, end: int) -> float:
        depths = [depth for each, _, _ in self.steps[start:end] for depth in each]
        return sum(depths) / len(depths)


Policy = Callable[[Sequence[DraftRequest]], DepthChoice]


def fixed(depth: int) -> Policy:
    """Every row drafts so deep with the head, always."""

    def choose(requests: Sequence[DraftRequest]) -> DepthChoice:
        feed = tuple((0, min(depth, request.offers[0][1]) if request.offers else 0) for request in requests)
        return DepthChoice(feed, (depth,) * len(requests))

    return choose


def choice_of_step(
    controller: DepthController, requests: Sequence[DraftRequest], num_cells: int
) -> DepthChoice:
    """As engine/draft_planner.py asks."""
    has_fixed = any(request.fixed_depth for request in requests)
    rows = sorted(requests, key=lambda request: request.joins)
    offers = [(request.record, offer) for request in rows for offer in request.offers]
    num_decoding = sum(not request.joins for request in requests)
    if not has_fixed and controller.stays_paused([request.record for request in rows], num_decoding, offers):
        return DepthChoice(((0, 0),) * len(requests), (0,) * len(requests))
    return controller.choose(requests, num_cells)


class Simulation:
    """Rows on a machine; they may come and go between steps."""

    def __init__(self, table: MeasuredCosts, controller: DepthController | None = None) -> None:
        self.truth = CostTable(table)
        measured = replace(table, by_tokens=True)  # as calibration makes it on a CPU
        self.controller = controller or new_controller(CostTable(measured), None, overlaps_steps=False)
        # A head that makes no drafts is not fed. Where passes are traced it is fed.
        self.pauses_heads = self.controller.shapes.depths == ALL_DEPTHS
        self.rows: list[SimulatedRow] = []

    def add(self, *found: Trace, drafts: bool = True) -> None:
        for i, trace in enumerate(found):
            record = self.controller.new_record(SamplingParams(temperature=trace.temperature))
            self.rows.append(SimulatedRow(trace, record, start=7 * i, drafts=drafts))

    def run(self, num_steps: int, policy: Policy | None = None, with_ngram: bool = False) -> Outcome:
        outcome = Outcome([])
        for _ in range(num_steps):
            outcome.steps.append(self._step(policy, with_ngram))
        return outcome

    def _step(self, policy: Policy | None, with_ngram: bool) -> tuple[tuple[int, ...], int, float]:
        offers = [
            row.offers(with_ngram and self.controller.asks_host_drafters(row.record)) for row in self.rows
        ]
        requests = [row.request(offer) for row, offer in zip(self.rows, offers, strict=True)]
        choice = policy(requests) if policy else choice_of_step(self.controller, requests, NUM_CELLS)
        depths = tuple(num for _, num in choice.feed)
        num_rows, width = self._pass_shape(depths, policy)
        tokens = 0
        caught_up_s = self._catch_up_s(choice)
        for row, offer, fed, wanted in zip(
            self.rows, offers, choice.feed, choice.num_drafts_next, strict=True
        ):
            committed = row.advance(offer, fed)
            row.behind = 0 if wanted or not self.pauses_heads else row.behind + committed
            row.made = wanted
            tokens += committed
        drafting = sum(wanted > 0 for wanted in choice.num_drafts_next)
        if policy is None and not self.pauses_heads:
            drafting = sum(row.drafts for row in self.rows)
        shape = StepShape(num_rows, width, drafting, max(choice.num_drafts_next), NUM_CELLS)
        seconds = self.truth.step_s(shape)
        host_s = self._host_s(has_drafts=bool(drafting or max(depths)))
        if policy is None and not caught_up_s:  # as in engine/draft_planner.py: step_shape
            self.controller.costs.observe(shape, host_s + self._observed_s(seconds), host_s)
        return depths, tokens, seconds + caught_up_s + host_s

    def _pass_shape(self, depths: Sequence[int], policy: Policy | None) -> tuple[int, float]:
        """Rows and mean width of the pass of a step."""
        num_rows, widest = len(depths), 1 + max(depths)
        if policy is not None:
            return num_rows, widest
        if isinstance(self.controller, PerDraftController):  # each row feeds its own number of drafts
            return num_rows, self.truth.mean_width(num_rows, num_rows + sum(depths), widest)
        return self.controller.shapes.decode_shape(num_rows, widest, NUM_CELLS, num_rows)

    def _host_s(self, has_drafts: bool) -> float:
        """The host's part of a step, before its launch."""
        return 0.0

    def _observed_s(self, seconds: float) -> float:
        """What the controller is told about a step that takes `seconds`."""
        return seconds

    def _catch_up_s(self, choice: DepthChoice) -> float:
        """Feeding the head what it missed, in one pass as wide as the longest gap."""
        behind = [row.behind for row, wanted in zip(self.rows, choice.num_drafts_next, strict=True) if wanted]
        if not behind or not max(behind):
            return 0.0
        if self.truth.measured.missed_cell_s:
            return sum(behind) * self.truth.measured.missed_cell_s
        few, many = 1, 16
        feeds = [self.truth.head_s(StepShape(num, 1, num)) for num in (few, many)]
        return feeds[0] + (feeds[1] - feeds[0]) / (many - few) * len(behind) * max(behind)


fixed_zero = fixed(0)


def answer_all(
    simulation: Simulation,
    asked: Sequence[tuple[Trace, bool]],
    num_streams: int,
    num_tokens: int,
    policy: Policy | None = None,
) -> tuple[float, float]:
    """Streams that take the next request when their answer has ended: seconds until the last one has, and
    the mean seconds of an answer. A request is a trace, and whether it may draft."""
    waiting, clock = list(asked), 0.0
    began: dict[SimulatedRow, tuple[float, int]] = {}  # when, and at which place of its trace
    lasted: list[float] = []
    while waiting or simulation.rows:
        while waiting and len(simulation.rows) < num_streams:
            trace, drafts = waiting.pop(0)
            simulation.add(trace, drafts=drafts)
            began[simulation.rows[-1]] = clock, simulation.rows[-1].place
        clock += simulation.run(1, policy).steps[0][2]
        for row in list(simulation.rows):
            if row.place - began[row][1] >= num_tokens:
                simulation.rows.remove(row)
                lasted.append(clock - began[row][0])
    return clock, sum(lasted) / len(lasted)


def pace(
    table: MeasuredCosts,
    rows: Sequence[Trace],
    num_steps: int,
    policy: Policy | None = None,
    with_ngram: bool = False,
) -> float:
    simulation = Simulation(table)
    simulation.add(*rows)
    return simulation.run(num_steps, policy, with_ngram).pace


# -- machines ----------------------------------------------------------------------------------------------


def machine(
    trunk: Callable[[int, int], float],
    feed: float,
    first: float,
    each: float,
    counts: Sequence[int] = (1, 2, 4, 8, 16),
) -> MeasuredCosts:
    """A table from a formula; the head's parts are shares of a plain step."""
    head = {r: HeadCost(feed * trunk(r, 1), first * trunk(r, 1), each * trunk(r, 1)) for r in counts}
    return MeasuredCosts({(r, w): trunk(r, w) for r in counts for w in WIDTHS}, head)


def _by_width(
    widths: Sequence[int], rows: Mapping[int, Sequence[float]], head: Mapping[int, HeadCost]
) -> MeasuredCosts:
    trunk = {(r, w): float(ms) for r, each in rows.items() for w, ms in zip(widths, each, strict=True)}
    return MeasuredCosts(trunk, head)


def _cpu() -> MeasuredCosts:
    """This project's reference CPU: SmolLM2-135M in float32, one thread, milliseconds."""
    rows = {
        1: (65.8, 69.2, 82.2, 80.8, 91.2, 94.3, 106.1, 116.2),
        2: (73.5, 86.0, 94.8, 100.9, 112.5, 112.9, 142.8, 142.1),
        4: (84.9, 103.2, 119.9, 135.7, 153.1, 167.9, 206.5, 225.8),
        8: (105.0, 141.6, 173.8, 201.1, 234.0, 276.7, 329.0, 360.7),
        16: (139.0, 216.0, 276.5, 344.5, 411.9, 461.4, 608.7, 678.9),
    }
    head = {1: HeadCost(2.0, 6.0, 7.5), 4: HeadCost(2.5, 7.5, 9.5), 16: HeadCost(4.5, 13.0, 15.5)}
    return _by_width((1, 2, 3, 4, 5, 6, 8, 9), rows, head)


def _own_products() -> MeasuredCosts:
    """The same CPU with both cores and products of our own."""
    rows = {
        1: (26.0, 25.4, 26.7, 28.4, 28.6, 28.5, 31.8, 34.8),
        2: (26.6, 30.2, 30.3, 32.5, 35.5, 40.2, 48.2, 52.9),
        4: (29.8, 32.7, 44.2, 49.3, 61.3, 69.8, 85.8, 96.6),
        8: (37.6, 54.0, 71.2, 88.1, 103.6, 123.7, 159.5, 181.9),
        16: (54.9, 89.3, 122.2, 154.9, 197.4, 220.0, 284.3, 327.6),
    }
    head = {
        1: HeadCost(0.2, 2.0, 2.3),
        4: HeadCost(0.7, 2.0, 2.8),
        8: HeadCost(0.3, 2.5, 2.7),
        16: HeadCost(0.7, 3.8, 4.5),
    }
    return _by_width((1, 2, 3, 4, 5, 6, 8, 9), rows, head)


def _two_threads() -> MeasuredCosts:
    """The same CPU with both cores, and OpenBLAS's products."""
    rows = {
        1: (46, 49, 61, 58),
        2: (49, 59, 82, 77),
        4: (63, 78, 90, 95),
        8: (76, 97, 116, 130),
        16: (100, 134, 169, 203),
    }
    head = {1: HeadCost(2.0, 4.0, 5.0), 4: HeadCost(2.5, 5.0, 7.0), 16: HeadCost(4.0, 9.0, 11.0)}
    return _by_width((1, 2, 3, 4), rows, head)


def _h200() -> MeasuredCosts:
    """An NVIDIA H200 with MLX 0.32.4, the shape of Qwen3.5-4B in bfloat16, milliseconds: bound by the host.

    MeasuredCosts by `benchmarks.gpu`, steps one at a time; one token of one row takes a path of its own.
    """
    rows = {
        1: {1: 8.97, 2: 19.34, 3: 15.03, 4: 18.78},
        2: {1: 20.58, 2: 19.87, 4: 20.19},
        4: {1: 18.18, 2: 18.02, 4: 18.11},
        8: {1: 20.09, 2: 19.45, 4: 20.20},
        16: {1: 18.86, 2: 19.39, 4: 19.39},
        32: {1: 21.78, 2: 22.29, 4: 20.98},
    }
    head = {
        1: HeadCost(0.31, 0.21, 0.52),
        2: HeadCost(0.07, 0.65, 0.72),
        4: HeadCost(0.48, 0.38, 0.85),
        8: HeadCost(0.11, 0.98, 1.09),
        16: HeadCost(0.08, 0.73, 0.81),
        32: HeadCost(0.09, 0.83, 0.93),
    }
    return MeasuredCosts({(r, w): ms for r, each in rows.items() for w, ms in each.items()}, head)


def _h200_small() -> MeasuredCosts:
    """The same device and SmolLM2-135M in float16: the host's noise is as large as the differences."""
    rows = {
        1: (6.59, 5.67, 5.96, 5.42, 5.25, 5.13),
        2: (7.13, 6.42, 7.19, 5.76, 7.61, 6.95),
        4: (6.69, 5.70, 5.32, 5.92, 4.99, 5.63),
        8: (7.11, 5.98, 6.07, 6.06, 7.48, 6.58),
        16: (7.15, 6.50, 6.25, 6.41, 6.70, 6.49),
        32: (7.81, 6.76, 7.29, 6.57, 7.65, 8.17),
    }
    head = {
        1: HeadCost(0.04, 0.40, 0.45),
        2: HeadCost(0.05, 0.45, 0.50),
        4: HeadCost(0.24, 0.34, 0.58),
        8: HeadCost(0.05, 0.47, 0.53),
        16: HeadCost(0.24, 0.32, 0.56),
        32: HeadCost(0.05, 0.42, 0.47),
    }
    return _by_width((1, 2, 3, 5, 8, 9), rows, head)


def _h200_quantised() -> MeasuredCosts:
    """The same device, the shape of Qwen3.5-27B in 4 bits, up to 8 rows: drafts of a single one are dear."""
    rows = {1: (17.2, 29.7, 48.8), 4: (43.1, 53.0, 75.5), 8: (106.8, 110.7, 110.8)}
    head = {1: HeadCost(0.7, 0.5, 1.2), 4: HeadCost(3.5, 2.9, 6.4), 8: HeadCost(1.0, 8.7, 9.7)}
    return _by_width((1, 2, 4), rows, head)


def _cliffs(rows: int, width: int) -> float:
    """A quantised product: 0.65, 1.14, 1.43, 1.92 ms for 1 to 4 tokens, 0.71 ms for 8 to 64."""
    tokens = rows * width
    few = {1: 0.65, 2: 1.14, 3: 1.43, 4: 1.92}
    return few.get(tokens, 0.71 if tokens >= 8 else 1.92) + 0.002 * max(0, tokens - 64)


def _quantised() -> MeasuredCosts:
    """The same CPU with both cores: SmolLM2-135M in 4 bits, milliseconds. Padding is skipped."""
    rows = {
        1: (8.2, 8.9, 10.0, 11.3, 12.5, 13.5, 15.6, 16.8),
        4: (12.8, 16.7, 21.5, 26.2, 30.3, 34.0, 40.8, 45.0),
        8: (18.2, 27.1, 35.5, 43.5, 51.5, 59.0, 77.0, 85.6),
        16: (29.7, 45.5, 62.0, 78.2, 93.0, 107.0, 143.0, 163.0),
    }
    head = {
        1: HeadCost(0.2, 0.3, 0.52),
        4: HeadCost(0.4, 0.75, 1.15),
        8: HeadCost(0.6, 0.75, 1.35),
        16: HeadCost(0.7, 1.75, 2.45),
    }
    return replace(_by_width((1, 2, 3, 4, 5, 6, 8, 9), rows, head), padding_share=0.0)


def _default_model() -> MeasuredCosts:
    """The same CPU, later: the default model in 4 bits, milliseconds by tokens. Padding is skipped."""
    tokens = (1, 2, 3, 4, 6, 8, 9, 12, 16, 32, 144)
    ms = (4.6, 4.8, 5.4, 6.3, 8.0, 9.8, 10.9, 13.4, 17.6, 33.6, 145.6)
    trunk = {(r, w): interpolated(tokens, ms, r * w) for r in (1, 2, 4, 8, 16) for w in WIDTHS}
    head = {
        1: HeadCost(0.05, 0.5, 0.51),
        4: HeadCost(0.25, 0.8, 0.8),
        8: HeadCost(0.4, 1.3, 1.3),
        16: HeadCost(0.7, 2.2, 2.2),
    }
    return MeasuredCosts(trunk, head, padding_share=0.0)


def _two_cores() -> MeasuredCosts:
    """Two cores of a server, later: the default model in 4 bits, milliseconds. Padding is skipped."""
    rows = {
        1: (2.89, 3.23, 3.92, 4.41, 5.17, 5.63, 6.02, 6.43, 6.91),
        2: (3.49, 4.35, 5.22, 6.08, 7.22, 8.15, 9.13, 10.16, 11.56),
        4: (4.73, 6.24, 8.51, 10.32, 12.76, 14.58, 16.61, 18.11, 20.68),
        8: (6.82, 10.51, 14.63, 18.53, 23.41, 26.72, 30.69, 34.67, 38.50),
        16: (11.85, 19.30, 27.00, 35.24, 43.47, 52.02, 58.84, 67.44, 77.64),
    }
    head = {
        1: HeadCost(0.19, 0.31, 0.50),
        2: HeadCost(0.20, 0.38, 0.58),
        4: HeadCost(0.19, 0.48, 0.67),
        8: HeadCost(0.20, 0.75, 0.95),
        16: HeadCost(0.30, 1.25, 1.55),
    }
    return replace(_by_width(WIDTHS, rows, head), padding_share=0.0, missed_cell_s=0.01)


MACHINES = {  # whose steps are read before the next one is launched
    "cpu": _cpu(),
    "two threads": _two_threads(),
    "own products": _own_products(),
    "quantised": _quantised(),
    "linear": machine(lambda r, w: float(r * w), 0.03, 0.1, 0.1),  # every token costs the same
    "flat": machine(lambda r, w: 1.0, 0.02, 0.02, 0.03),  # tokens are free
    "default model": _default_model(),
    "two cores": _two_cores(),
}
TRACED_MACHINES = {
    "h200": _h200(),
    "h200 small": _h200_small(),
    "h200 quantised": _h200_quantised(),
    "gpu": machine(lambda r, w: 2.4 + 0.1 * r + 0.02 * r * w, 0.03, 0.05, 0.06),  # bound by memory and host
    "flat": MACHINES["flat"],
    "cliffs": machine(_cliffs, 0.03, 0.05, 0.06),
}
