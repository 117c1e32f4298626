"""The cases on which `depth_ablation` compares controllers of drafts: simulated bursts, auto / off.

A burst sends some requests for each row at once. A row takes the next request when its answer has ended.
Answers have different lengths, and begin at different places of the recorded traces.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "speculate"))  # the simulator
from depth_simulator import (
    MACHINES,
    NUM_CELLS,
    TRACED_MACHINES,
    Policy,
    SimulatedRow,
    Simulation,
    Trace,
    by_chance,
    fixed,
    traces,
)

from outrider.speculate.controller import DepthController
from outrider.speculate.costs import CostTable, MeasuredCosts
from outrider.speculate.per_draft import new_controller
from outrider.speculate.shapes import num_slots_for

# Of the host before a step's launch: to commit the last step and to plan this one. With drafts, and without.
DRAFTING_MS, PLAIN_MS = 0.65, 0.35
TRACE_STEPS = 8  # plain steps of one row that the first pass of a shape takes, where passes are traced
PART = 40  # tokens after which a text that changes does so
NOISE = 0.1  # of a step's time, as the standard deviation of its logarithm
STALL_SHARE, STALL = 0.03, 3.0  # share of steps that other load makes longer, and by how much
WRONG_BY = (0.8, 1.0, 1.2)  # factors of the costs that a wrong table begins with

KINDS = {
    "chat": ("chat", False),
    "hot chat": ("chat", True),
    "code": ("code", False),
    "words": ("words", True),
    "anything": (None, None),
}


@dataclass(frozen=True)
class Case:
    machine: str
    kind: str  # one of KINDS, "changing" or "by chance"
    num_rows: int
    num_tokens: int = 128  # of the longest answer; the shortest has half as many
    num_each: int = 1  # requests of each row
    has_plain: bool = False  # a third of the requests never drafts
    is_wrong: bool = False  # some shapes cost other than the table says at first
    is_busy: bool = False  # steps take now more and now less time than expected
    is_warm: bool = False  # after another burst of code with the same controller
    warm_rows: int | None = None  # of the burst before it; None: as many as in this one

    @property
    def is_traced(self) -> bool:
        return self.machine not in MACHINES

    @property
    def table(self) -> MeasuredCosts:
        return TRACED_MACHINES[self.machine] if self.is_traced else MACHINES[self.machine]

    @property
    def group(self) -> str:
        """Which controller serves it: "margins", "counts", or "traced" (counts, and few shapes)."""
        if self.is_traced:
            return "traced"
        return "margins" if self.table.padding_share < 1 else "counts"


def stored(kind: str, num_rows: int, *args: Any, **kwargs: Any) -> Case:
    """With what single streams have taught the controller of the head's margins, as stored between runs."""
    return Case("two cores", kind, num_rows, *args, is_warm=True, warm_rows=1, **kwargs)


MARGIN_CASES = [
    *(stored(kind, rows) for kind in ("chat", "code") for rows in (1, 2, 4, 8, 16)),
    *(stored("hot chat", rows) for rows in (1, 4, 8)),
    *(stored("words", rows) for rows in (1, 4, 8)),
    *(stored(kind, rows, 64) for kind, rows in (("chat", 4), ("code", 8))),
    *(stored(kind, rows, num_each=3) for kind, rows in (("chat", 4), ("code", 8))),
    *(stored(kind, rows, is_wrong=True, is_busy=True) for kind, rows in (("chat", 4), ("code", 8))),
    stored("chat", 4, has_plain=True),
    stored("changing", 4, 256),
    *(Case("default model", "chat", rows) for rows in (1, 2, 4, 8, 16)),
    *(Case("default model", "hot chat", rows) for rows in (1, 3, 8)),
    *(Case("default model", "code", rows) for rows in (1, 2, 4, 8, 16)),
    *(Case("default model", "words", rows) for rows in (1, 2, 4, 6)),
    *(Case("default model", "changing", rows, 256) for rows in (1, 2, 4)),
    *(Case("default model", "by chance", rows) for rows in (1, 4)),
    Case("default model", "code", 1, 512),
    Case("default model", "chat", 2, 512),
    *(Case("default model", kind, rows, num_each=3) for kind, rows in (("hot chat", 2), ("chat", 4))),
    *(Case("default model", kind, rows, has_plain=True) for kind, rows in (("chat", 3), ("code", 6))),
    *(Case("default model", kind, rows, is_warm=True) for kind, rows in (("chat", 2), ("words", 3))),
    *(Case("default model", "code", rows, is_wrong=True) for rows in (1, 2, 4)),
    *(Case("default model", kind, rows, is_busy=True) for kind, rows in (("chat", 1), ("code", 4))),
    Case("default model", "code", 2, 256, is_wrong=True, is_busy=True),
    *(Case("default model", kind, 1, 512, 3, is_wrong=True) for kind in ("chat", "hot chat")),
    *(Case("quantised", kind, rows) for kind, rows in (("chat", 4), ("code", 8), ("hot chat", 2))),
]
COUNT_CASES = [
    *(Case("cpu", kind, rows) for kind, rows in (("chat", 1), ("code", 4), ("words", 2))),
    *(Case("own products", kind, rows) for kind, rows in (("chat", 2), ("hot chat", 4), ("code", 8))),
    *(Case("two threads", kind, rows) for kind, rows in (("words", 1), ("chat", 4))),
    *(Case("own products", "changing", rows, 256) for rows in (1, 4)),
    Case("own products", "code", 6, has_plain=True),
    Case("own products", "chat", 2, num_each=3),
    Case("own products", "words", 2, is_warm=True),
    *(Case("own products", "code", rows, is_wrong=True) for rows in (1, 4)),
    *(Case("own products", "chat", rows, is_busy=True) for rows in (1, 4)),
    Case("cpu", "code", 2, 256, is_wrong=True, is_busy=True),
]
TRACED_CASES = [
    Case(machine, kind, rows, num_each=2, is_warm=True)
    for machine, kind, rows in (
        ("h200", "chat", 4),
        ("h200", "code", 8),
        ("h200 small", "words", 8),
        ("h200 quantised", "chat", 2),
        ("gpu", "hot chat", 1),
        ("gpu", "chat", 8),
        ("gpu", "code", 12),
        ("cliffs", "code", 2),
        ("cliffs", "chat", 8),
    )
] + [
    Case("gpu", "changing", 4, 256, is_warm=True),
    Case("gpu", "code", 6, has_plain=True, is_warm=True),
    Case("gpu", "code", 4, is_wrong=True, is_busy=True, is_warm=True),
]
GROUPS = (MARGIN_CASES, COUNT_CASES, TRACED_CASES)
CASES = [case for group in GROUPS for case in group]


class MachineOfCase(Simulation):
    """Adds what a case may have: padded and traced passes, noise."""

    def __init__(self, case: Case, seed: int, controller: DepthController) -> None:
        super().__init__(case.table, controller)
        self.case = case
        self._noise = random.Random(seed)
        self._num_slots = num_slots_for(case.num_rows)
        self._traced: set[tuple[int, int]] = set()
        self.tracing_s = 0.0  # in the last step

    def _pass_shape(self, depths: Sequence[int], policy: Policy | None) -> tuple[int, float]:
        num_rows, widest, shapes = len(depths), 1 + max(depths), self.controller.shapes
        shapes.count_step(num_rows, widest)
        shape = shapes.decode_shape(num_rows, widest, NUM_CELLS, self._num_slots)
        is_new = self.case.is_traced and shape not in self._traced
        self._traced.add(shape)
        self.tracing_s = TRACE_STEPS * self.case.table.trunk_s[1, 1] if is_new else 0.0
        return shape[0], self.truth.mean_width(shape[0], num_rows + sum(depths), shape[1])

    def _host_s(self, has_drafts: bool) -> float:
        if self.case.is_traced:
            return 0.0  # steps overlap
        return DRAFTING_MS if has_drafts else PLAIN_MS

    def _observed_s(self, seconds: float) -> float:
        """The controller sees the noise. The clock has none, so ratios have less."""
        if not self.case.is_busy:
            return seconds
        stall = STALL if self._noise.random() < STALL_SHARE else 1.0
        return seconds * stall * self._noise.lognormvariate(0.0, NOISE)


NewController = Callable[[Case, CostTable], DepthController]


def usual_controller(case: Case, costs: CostTable) -> DepthController:
    return new_controller(costs, None, overlaps_steps=case.is_traced)


def run_burst(
    case: Case, seed: int, new: NewController = usual_controller, depth: int | None = None
) -> tuple[float, float]:
    """Time until the last answer has ended, and the mean time of an answer. `depth`: None is auto."""
    policy = None if depth is None else fixed(depth)
    rng = random.Random(f"{case} {seed}")
    simulation = MachineOfCase(case, seed, new(case, CostTable(_first_table(case, rng))))
    if case.is_warm:
        _answer(simulation, _first_burst(case), rng, policy)
    return _answer(simulation, case, rng, policy)


@functools.cache
def off(case: Case, seed: int) -> tuple[float, float]:
    """The same burst without drafts. Cached: the constants as they are, for all alternatives."""
    return run_burst(case, seed, depth=0)


def _first_table(case: Case, rng: random.Random) -> MeasuredCosts:
    table = replace(case.table, by_tokens=not case.is_traced)  # as calibration makes it
    if not case.is_wrong:
        return table
    return replace(table, trunk_s={key: s * rng.choice(WRONG_BY) for key, s in table.trunk_s.items()})


def _first_burst(case: Case) -> Case:
    if case.warm_rows is None:
        return replace(case, kind="code", num_each=1)
    return replace(
        case, kind="anything", num_rows=case.warm_rows, num_tokens=128, num_each=12, has_plain=False
    )


def _answer(
    simulation: MachineOfCase, case: Case, rng: random.Random, policy: Policy | None
) -> tuple[float, float]:
    asked = [_request(case, i, rng) for i in range(case.num_rows * case.num_each)]
    clock, lasted = 0.0, []
    began: dict[SimulatedRow, float] = {}
    while asked or simulation.rows:
        while asked and len(simulation.rows) < case.num_rows:
            trace, start, num_tokens, drafts = asked.pop(0)
            simulation.add(trace, drafts=drafts)
            row = simulation.rows[-1]
            row.place, row.end, began[row] = start, start + num_tokens, clock
        ((_, _, seconds),) = simulation.run(1, policy, with_ngram=policy is None).steps
        clock += seconds + simulation.tracing_s
        ended = [row for row in simulation.rows if row.place >= row.end]
        lasted += [clock - began[row] for row in ended]
        simulation.rows = [row for row in simulation.rows if row.place < row.end]
    return clock, sum(lasted) / len(lasted)


def _request(case: Case, i: int, rng: random.Random) -> tuple[Trace, int, int, bool]:
    """A trace, where it begins, how long the answer is, and whether it may draft."""
    trace = _trace(case.kind, rng)
    num_tokens = rng.randint(case.num_tokens // 2, case.num_tokens)
    return trace, rng.randrange(len(trace.head)), num_tokens, not (case.has_plain and i % 3 == 0)


def _trace(kind: str, rng: random.Random) -> Trace:
    if kind == "by chance":
        return by_chance(0.75, rng.randrange(1000), length=500)
    if kind != "changing":
        return rng.choice(traces(*KINDS[kind]))
    easy, hard = _trace("code", rng), _trace("words", rng)
    num = min(len(easy.head), len(hard.head)) // PART
    parts = [each.part(i * PART, (i + 1) * PART) for i in range(num) for each in (easy, hard)]
    return functools.reduce(Trace.__add__, parts)
