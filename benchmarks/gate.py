"""The gate: has a change made rows slower? Some ratios of decode throughput, each with a lower bound.

    make bench-gate
    python -m benchmarks.gate [--model M] [--head FILE] [--rounds 3] [--tokens 24]

    plain / mlx-lm   plain rows over mlx-lm's batch generator, on the same weights
    auto / off       drafts at auto depth over no drafts
    mixed / solo     steps per second of plain rows beside drafting rows, over those of plain rows alone

Every ratio is one of runs that take turns in one process, so the speed of the machine matters little. Ends
with status 1 if the median of a ratio is below its bound, twice: other load may explain one time. On a CPU
the last two are taken of the process's CPU time, which other load changes least; the first is of the wall
clock, as mlx-lm's generator measures, so that it alone shows threads that wait for each other. The bounds are
for the default model on two x86 cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.side_by_side import StepBench, ratios, spread
from outrider.llm import default_model
from outrider.models import machine
from outrider.request import DraftDepth

Measure = Callable[[int], list[float]]  # rounds -> a ratio for each round
DRAFTING: DraftDepth = 2  # depth of the rows that draft beside plain ones: "auto" may choose none

# The least median of each ratio that is not called slower, by the number of rows.
PLAIN_BOUNDS = {1: 1.2, 8: 1.2}
AUTO_BOUNDS = {1: 0.9, 8: 0.7}
MIXED_BOUNDS = {8: 0.65}


@dataclass(frozen=True)
class Gate:
    name: str
    bound: float
    measure: Measure


@dataclass(frozen=True)
class Verdict:
    gate: Gate
    found: Sequence[float]  # the ratios that decided

    @property
    def is_green(self) -> bool:
        return statistics.median(self.found) >= self.gate.bound

    def text(self) -> str:
        word = "green" if self.is_green else "RED"
        return f"{word:6}{self.gate.name:26}{spread(self.found):22}at least {self.gate.bound:.2f}"


def judge(gate: Gate, rounds: int) -> Verdict:
    """A ratio below its bound is measured once more, with twice the rounds. Only these decide then."""
    verdict = Verdict(gate, gate.measure(rounds))
    return verdict if verdict.is_green else Verdict(gate, gate.measure(2 * rounds))


def gates(bench: StepBench, num_tokens: int) -> list[Gate]:
    found = [
        Gate(f"plain / mlx-lm, {rows} rows", bound, _plain(bench, rows, num_tokens))
        for rows, bound in PLAIN_BOUNDS.items()
    ]
    if bench.head is not None:
        found += [
            Gate(f"auto / off, {rows} rows", bound, _auto(bench, rows, num_tokens))
            for rows, bound in AUTO_BOUNDS.items()
        ]
        found += [
            Gate(f"mixed / solo, {rows} rows", bound, _mixed(bench, rows, num_tokens))
            for rows, bound in MIXED_BOUNDS.items()
        ]
    return found


def _plain(bench: StepBench, rows: int, num_tokens: int) -> Measure:
    def measure(rounds: int) -> list[float]:
        clock, bench.clock = bench.clock, time.perf_counter  # mlx-lm's generator has no other clock
        found = ratios(
            lambda: bench.ours([0] * rows, num_tokens)[0], lambda: bench.mlx_lm(rows, num_tokens), rounds
        )
        bench.clock = clock
        return found

    return measure


def _auto(bench: StepBench, rows: int, num_tokens: int) -> Measure:
    def measure(rounds: int) -> list[float]:
        bench.ours(["auto"] * rows, num_tokens)  # auto learns
        return ratios(
            lambda: bench.ours(["auto"] * rows, num_tokens)[0],
            lambda: bench.ours([0] * rows, num_tokens)[0],
            rounds,
        )

    return measure


def _mixed(bench: StepBench, rows: int, num_tokens: int) -> Measure:
    def pace(depths: Sequence[DraftDepth]) -> float:
        run, _ = bench.ours(depths, num_tokens)
        return run.num_steps / run.seconds

    return lambda rounds: [pace([0, DRAFTING] * (rows // 2)) / pace([0] * rows) for _ in range(rounds)]


def main() -> int:
    args = _arguments()
    started_s = time.perf_counter()
    bench = StepBench(args.model or default_model(), args.head, None)
    if bench.head is None:
        print("The model has no head: only plain rows are measured.")
    else:
        bench.measure_costs(max(AUTO_BOUNDS))
    bench.clock = time.process_time if machine.is_cpu() else time.perf_counter
    verdicts = []
    for gate in gates(bench, args.tokens):
        verdicts.append(judge(gate, args.rounds))
        print(verdicts[-1].text(), flush=True)
    num_red = sum(not verdict.is_green for verdict in verdicts)
    print(
        f"{num_red} of {len(verdicts)} ratios are below their bounds; {time.perf_counter() - started_s:.0f} s"
    )
    return 1 if num_red else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="model folder or Hugging Face id (default: the default model)")
    parser.add_argument("--head", help="file of the MTP head (default: the head beside the model)")
    parser.add_argument("--tokens", type=int, default=24, help="that each row decodes (24)")
    parser.add_argument("--rounds", type=int, default=3, help="of each ratio (3)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
