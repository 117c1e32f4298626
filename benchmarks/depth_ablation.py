"""What each part and each constant of the drafts' controllers earns, on simulated bursts (depth_cases.py).

    python -m benchmarks.depth_ablation [--seeds 6] [--only NAME ..] [--parts | --constants]

Two tables. The first shows what each part of the controllers earns over simpler ones. The second shows for
every constant what changes if it is halved, doubled, or set so that its mechanism does nothing ("off").
Every figure is a ratio auto / off: the time of a burst without drafts over its time on auto.

    last     by the end of the last answer, mean of all cases
    mean     by the mean answer, mean of all cases
    worst    by the end of the last answer, the worst case

A change is followed by its noise: the standard error over the seeds (jackknife). All alternatives see the
same bursts. `*`: a change of at least 0.002 that is more than twice its noise.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, NamedTuple

from benchmarks.depth_cases import (
    CASES,
    MARGIN_CASES,
    Case,
    NewController,
    off,
    run_burst,
    usual_controller,
)
from outrider.request import MAX_DEPTH, SamplingParams
from outrider.speculate import (
    acceptance,
    confidence,
    controller,
    costs,
    depth,
    per_draft,
    shapes,
    token_costs,
)
from outrider.speculate.acceptance import RowAcceptance, Source
from outrider.speculate.confidence import Classes
from outrider.speculate.controller import DepthController
from outrider.speculate.costs import CostTable
from outrider.speculate.per_draft import PerDraftController

MIN_CHANGE = 0.002  # a smaller change is never marked
NEVER = 10**9  # steps

Alternatives = dict[str, Any]  # by name: the value


@dataclass(frozen=True)
class Constant:
    place: Any  # the module or class that has the constant
    name: str
    alternatives: Alternatives = field(default_factory=dict)
    groups: tuple[str, ...] = ("margins", "counts", "traced")  # of the cases that it may change
    others: tuple[Any, ...] = ()  # modules that import it
    class_: type | None = None  # that has it as an attribute too, in small letters

    @property
    def label(self) -> str:
        return f"{self.place.__name__.rpartition('.')[2]}.{self.name}"


# Not in the table: simulated bursts have no long prompts, nothing stored, and no overlapped steps.
OUTSIDE = (
    "CONFIRMED_STEPS",
    "MAX_CATCH_UP",
    "MAX_HEAD_LAG",
    "MARGINS",  # the traces are recorded with these classes
    "MATCHES",
    "BLOCKS_PARTS",
    "BLOCKS_STEP",
    "CAPACITY_PARTS",
    "CELL_PARTS",
    "CELL_STEP",
    "MAX_PADDING_CELLS",
    "PREFILL_PARTS",
    "PREFILL_STEP",
)


def scaled(value: float) -> Alternatives:
    half = value // 2 if isinstance(value, int) else value / 2
    return {"half": half, "double": value * 2}


def memory(decay: float) -> Alternatives:
    """Half and twice as many comparisons count, or all."""
    return {"half": 1 - 2 * (1 - decay), "double": 1 - (1 - decay) / 2, "off": 1.0}


def excess(ratio: float) -> Alternatives:
    """Half and twice as far from 1; off: 1."""
    return {"half": 1 + (ratio - 1) / 2, "double": 1 + (ratio - 1) * 2, "off": 1.0}


def all_begin_at(chance: float) -> dict[Source, Classes]:
    """All classes of drafts have the same chance before anything was compared."""
    return {
        source: Classes(each.limits, (chance,) * len(each.first_chances))
        for source, each in acceptance.CLASSES.items()
    }


def constants() -> list[Constant]:
    counted, traced, judged = ("counts", "traced"), ("traced",), ("margins",)
    a, c, p, s, t = acceptance, costs, per_draft, shapes, token_costs
    never = {"off": NEVER}
    unused = {"off": 1e9}  # a weight that makes a prior all that counts
    return [
        Constant(a, "ROW_DECAY", memory(a.ROW_DECAY)),
        Constant(a, "RECENT_DECAY", memory(a.RECENT_DECAY)),
        Constant(a, "MODEL_DECAY", memory(a.MODEL_DECAY)),
        Constant(a, "IDLE_DECAY", memory(a.IDLE_DECAY), counted),
        Constant(a, "ROW_PRIOR_WEIGHT", scaled(a.ROW_PRIOR_WEIGHT) | unused),
        Constant(a, "RECENT_PRIOR_WEIGHT", scaled(a.RECENT_PRIOR_WEIGHT) | unused),
        Constant(a, "GUESS_WEIGHT", scaled(a.GUESS_WEIGHT) | {"off": 0.01}),
        Constant(a, "FIRST_GUESS", {"off": dict.fromkeys(a.FIRST_GUESS, 0.6)}),
        Constant(a, "TEMPERATURE_LIMITS", {"off": (0.0,)}),
        Constant(confidence, "CLASS_DECAY", memory(confidence.CLASS_DECAY), judged),
        Constant(
            confidence, "PRIOR_WEIGHT", scaled(confidence.PRIOR_WEIGHT) | {"never": 0.01} | unused, judged
        ),
        Constant(
            a,
            "CLASSES",
            {"half": all_begin_at(0.5), "double": all_begin_at(0.9), "off": all_begin_at(0.7)},
            judged,
        ),
        Constant(c, "NEWEST_SHARE", scaled(c.NEWEST_SHARE), others=(p,)),
        Constant(
            controller,
            "PROBE_INTERVAL",
            scaled(controller.PROBE_INTERVAL) | never,
            counted,
            (),
            DepthController,
        ),
        Constant(
            controller, "NUM_PROBE_ROWS", scaled(controller.NUM_PROBE_ROWS), counted, (), DepthController
        ),
        Constant(controller, "MAX_INTERVALS", scaled(controller.MAX_INTERVALS) | never),
        Constant(controller, "OTHER_SHARE_GAIN", scaled(controller.OTHER_SHARE_GAIN) | {"off": 0.0}, counted),
        Constant(controller, "MIN_OTHER_SHARE", scaled(controller.MIN_OTHER_SHARE) | {"off": 0.0}, counted),
        Constant(depth, "MIN_SPEEDUP", excess(depth.MIN_SPEEDUP), counted),
        Constant(c, "SLOWDOWN_GAIN", scaled(c.SLOWDOWN_GAIN) | {"off": 0.0}),
        Constant(c, "CORRECTION_GAIN", scaled(c.CORRECTION_GAIN) | {"off": 0.0}),
        Constant(c, "DRAFT_PRICE_GAIN", scaled(c.DRAFT_PRICE_GAIN) | {"off": 0.0}, ("counts", "margins")),
        Constant(c, "MAX_DEVIATION", scaled(c.MAX_DEVIATION) | {"off": math.inf}),
        Constant(c, "MAX_CORRECTION", scaled(c.MAX_CORRECTION) | {"off": math.inf}),
        Constant(c, "CORRECTION_DECAY", memory(c.CORRECTION_DECAY)),
        Constant(t, "NEARBY", scaled(t.NEARBY), judged),
        Constant(t, "MAX_FROM_LINE", scaled(t.MAX_FROM_LINE) | {"off": math.inf}, ("counts", "margins")),
        Constant(t, "MOST_BY_ROWS", scaled(t.MOST_BY_ROWS) | {"off": 0.0}, judged),
        Constant(p, "MAX_PADDING_SHARE", {"off": 2.0}, ("counts",)),
        Constant(p, "MAX_WAIT", excess(p.MAX_WAIT), judged),
        Constant(p, "OTHERS_WEIGHT", scaled(p.OTHERS_WEIGHT) | {"off": 1}, judged),
        Constant(p, "MAX_ROWS_AT_COST", scaled(p.MAX_ROWS_AT_COST) | {"off": math.inf}, judged),
        Constant(
            p, "MAX_ROWS_OF_LOOKUPS", scaled(p.MAX_ROWS_OF_LOOKUPS) | {"off": p.MAX_ROWS_AT_COST}, judged
        ),
        Constant(p, "LOOKUP_INTERVAL", {"half": 2, "double": 8, "off": 1}, judged),
        Constant(p, "PROBE_INTERVAL", scaled(p.PROBE_INTERVAL) | never, judged, (), PerDraftController),
        Constant(p, "NUM_PROBE_ROWS", scaled(p.NUM_PROBE_ROWS), judged, (), PerDraftController),
        Constant(s, "FEW_DEPTHS", {"off": s.ALL_DEPTHS}, traced),
        Constant(s, "FREE_PADDING", excess(s.FREE_PADDING), traced),
        Constant(s, "MAX_PADDING", excess(s.MAX_PADDING), traced),
        Constant(s, "WIDEN_BELOW", excess(s.WIDEN_BELOW) | {"never": 0.0}, traced),
        Constant(s, "FEW_WIDTHS", {"off": tuple(c.WIDTHS)}, traced),
        Constant(s, "FEW_ROW_COUNTS", {"off": tuple(range(1, 129))}, traced),
        Constant(s, "FREQUENT_SHARE", scaled(s.FREQUENT_SHARE) | {"off": 2.0}, traced),
        Constant(s, "NEWEST_STEP_SHARE", scaled(s.NEWEST_STEP_SHARE), traced),
        Constant(s, "MIN_DEPTH_GAIN", excess(s.MIN_DEPTH_GAIN), traced),
    ]


@contextmanager
def changed(constant: Constant, value: Any) -> Iterator[None]:
    places = [(place, constant.name) for place in (constant.place, *constant.others)]
    if constant.class_ is not None:
        places.append((constant.class_, constant.name.lower()))
    usual = getattr(constant.place, constant.name)
    for place, name in places:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name in places:
            setattr(place, name, usual)


# -- figures -----------------------------------------------------------------------------------------------

Ratios = dict[Case, list[tuple[float, float]]]  # for each seed: by the last answer, by the mean answer


class Figures(NamedTuple):
    last: float
    mean: float
    worst: float


def ratios_of(
    cases: Sequence[Case],
    num_seeds: int,
    new: NewController = usual_controller,
    constant_depth: int | None = None,
) -> Ratios:
    found: Ratios = {}
    for case in cases:
        runs = ((off(case, seed), run_burst(case, seed, new, constant_depth)) for seed in range(num_seeds))
        found[case] = [(plain[0] / auto[0], plain[1] / auto[1]) for plain, auto in runs]
    return found


def figures(ratios: Ratios, without: int | None = None) -> Figures:
    """`without`: a seed that is left out."""
    by_case = []
    for each in ratios.values():
        kept = [pair for seed, pair in enumerate(each) if seed != without]
        by_case.append((mean(last for last, _ in kept), mean(answer for _, answer in kept)))
    lasts = [last for last, _ in by_case]
    return Figures(mean(lasts), mean(answer for _, answer in by_case), min(lasts))


def changes(before: Ratios, after: Ratios) -> list[tuple[float, float]]:
    """For each figure: by how much it changes, and the noise of the change."""
    num_seeds = len(next(iter(before.values())))
    found = []
    for i, (old, new) in enumerate(zip(figures(before), figures(after), strict=True)):
        parts = [figures(after, seed)[i] - figures(before, seed)[i] for seed in range(num_seeds)]
        square = sum((part - mean(parts)) ** 2 for part in parts)
        found.append((new - old, math.sqrt(square * (num_seeds - 1) / num_seeds)))
    return found


def change_of(constant: Constant, value: Any, before: Ratios) -> list[tuple[float, float]]:
    """The changes of all cases' figures. Cases that the constant cannot change are not run again."""
    cases = [case for case in before if case.group in constant.groups]
    with changed(constant, value):
        after = ratios_of(cases, len(next(iter(before.values()))))
    return changes({case: before[case] for case in cases}, after)


# -- tables ------------------------------------------------------------------------------------------------


def print_constants(num_seeds: int, only: Sequence[str] = ()) -> None:
    wanted = [each for each in constants() if not only or each.name in only]
    groups = {group for each in wanted for group in each.groups}
    before = ratios_of([case for case in CASES if case.group in groups], num_seeds)
    for group in sorted(groups):
        found = figures({case: ratios for case, ratios in before.items() if case.group == group})
        print(f"{group:8} as it is: last {found.last:.3f}  mean {found.mean:.3f}  worst {found.worst:.3f}")
    print(f"\n{'constant':34} {'value':>22} {'last':>16} {'mean':>16} {'worst':>16}")
    noises: list[tuple[float, ...]] = []
    for constant in wanted:
        for name, value in constant.alternatives.items():
            found_changes = change_of(constant, value, before)
            noises.append(tuple(noise for _, noise in found_changes))
            cells = "".join(_cell(*each) for each in found_changes)
            print(f"{constant.label:34} {name + ' ' + _short(value):>22}{cells}", flush=True)
    medians = (sorted(each)[len(each) // 2] for each in zip(*noises, strict=True))
    print("\nmedian noise of a change: last {:.4f}, mean {:.4f}, worst {:.4f}".format(*medians))


def _cell(change: float, noise: float) -> str:
    mark = "*" if abs(change) > max(MIN_CHANGE, 2 * noise) else " "
    return f"   {change:+.4f} {noise:.4f}{mark}"


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else ""


class FixedRecord(RowAcceptance):
    """Learns nothing: every row keeps the first guess."""

    def add(self, *args: Any, **kwargs: Any) -> None:
        pass


class CostsAlone(DepthController):
    def new_record(self, params: SamplingParams) -> RowAcceptance:
        return FixedRecord(self.acceptance, params)


class UncorrectedCosts(CostTable):
    def observe(self, *args: Any, **kwargs: Any) -> None:
        pass


def _with(kind: Callable[[CostTable], DepthController], corrects: bool = True) -> NewController:
    def new(case: Case, table: CostTable) -> DepthController:
        return kind(table if corrects else UncorrectedCosts(table.measured))

    return new


def print_parts(num_seeds: int) -> None:
    """From a constant depth to the controller that judges each draft, in the cases that the latter serves."""
    depths = {d: ratios_of(MARGIN_CASES, num_seeds, constant_depth=d) for d in range(1, MAX_DEPTH + 1)}
    best = max(depths, key=lambda d: figures(depths[d]).last)
    parts = {
        f"the best constant depth: {best}": depths[best],
        "measured costs, the first guess of chances": ratios_of(
            MARGIN_CASES, num_seeds, _with(CostsAlone, corrects=False)
        ),
        "+ chances from counts": ratios_of(MARGIN_CASES, num_seeds, _with(DepthController, corrects=False)),
        "+ corrected costs (DepthController)": ratios_of(MARGIN_CASES, num_seeds, _with(DepthController)),
        "+ each draft's margin (PerDraftController)": ratios_of(MARGIN_CASES, num_seeds),
    }
    print(f"{'part':44}     last     mean    worst   last, 1 row   last, 2 to 3   last, 4 to 16")
    for name, ratios in parts.items():
        by_rows = [
            mean(last for case, each in ratios.items() if case.num_rows in rows for last, _ in each)
            for rows in ((1,), (2, 3), range(4, 17))
        ]
        print(f"{name:44} " + "".join(f"{x:9.3f}" for x in figures(ratios)), end="  ")
        print("".join(f"{x:14.3f}" for x in by_rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="some constants")
    parser.add_argument("--parts", action="store_true", help="the first table only")
    parser.add_argument("--constants", action="store_true", help="the second table only")
    args = parser.parse_args()
    if not (args.constants or args.only):
        print_parts(args.seeds)
        print()
    if not args.parts:
        print_constants(args.seeds, args.only)


if __name__ == "__main__":
    main()
