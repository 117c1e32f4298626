"""Decode throughput: plain rows over mlx-lm's batch generator, drafts on over off, and a mixed batch.

    python -m benchmarks.decode [--model M] [--head FILE] [--prompts FILE] [--rows 1 4 8 16] [--tokens 48]

Every figure is a ratio of runs that took turns on the same weights: median (lowest-highest).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from benchmarks.side_by_side import StepBench, ratios, spread
from outrider.llm import default_model
from outrider.request import DraftDepth


def main() -> None:
    args = _arguments()
    questions = json.loads(args.prompts.read_text()) if args.prompts else None
    bench = StepBench(args.model or default_model(), args.head, args.draft_vocabulary, questions)
    print(f"{bench.loaded.path.name}, {args.tokens} tokens per row, {args.rounds} rounds\n")
    if "plain" in args.parts:
        _plain(bench, args)
    if args.process_time:
        bench.clock = time.process_time
    if bench.head is None:
        print("The model has no head: drafting is not measured.")
        return
    if "depth" in args.parts:
        _depth(bench, args)
    if "auto" in args.parts:
        _auto(bench, args)
    if "mixed" in args.parts:
        _mixed(bench, args)


def _plain(bench: StepBench, args: argparse.Namespace) -> None:
    print("plain rows over mlx-lm's batch generator (same weights)")
    for rows in args.rows:
        found = ratios(
            lambda rows=rows: bench.ours([0] * rows, args.tokens)[0],
            lambda rows=rows: bench.mlx_lm(rows, args.tokens),
            args.rounds,
        )
        print(f"  {rows:3d} rows   {spread(found)}", flush=True)
    print()


def _depth(bench: StepBench, args: argparse.Namespace) -> None:
    print("constant depth over depth 0; tokens per step; accepted share by position")
    for rows in args.rows:
        for depth in args.depths:
            strides, shares = [], []

            def drafted(rows: int = rows, depth: int = depth, out: tuple = (strides, shares)):  # type: ignore
                run, sequences = bench.ours([depth] * rows, args.tokens, args.temperature)
                out[0].append(
                    sum(s.num_generated for s in sequences) / sum(s.counters.steps for s in sequences)
                )
                out[1].append(_shares(sequences, depth))
                return run

            found = ratios(
                drafted,
                lambda rows=rows: bench.ours([0] * rows, args.tokens, args.temperature)[0],
                args.rounds,
            )
            share = " ".join(f"{x:.2f}" for x in shares[0])
            print(
                f"  {rows:3d} rows  depth {depth}   {spread(found)}   {strides[0]:.2f}   {share}", flush=True
            )
    print()


def _auto(bench: StepBench, args: argparse.Namespace) -> None:
    """Auto depth, depth 0 and constant depths take turns. Every round gives one ratio to depth 0."""
    bench.measure_costs(max(args.rows))
    print("auto and constant depths over depth 0, in turns; tokens per step and mean depth of auto")
    for rows in args.rows:
        policies: list[DraftDepth] = ["auto", 0, *args.depths]
        paces: dict[DraftDepth, list[float]] = {policy: [] for policy in policies}
        strides, drafts = [], []
        bench.ours(["auto"] * rows, args.tokens, args.temperature, 3)  # warm-up; auto learns
        for number in range(args.rounds):
            for policy in policies[number % len(policies) :] + policies[: number % len(policies)]:
                run, sequences = bench.ours([policy] * rows, args.tokens, args.temperature, number * rows)
                paces[policy].append(run.tokens_per_s)
                if policy == "auto":
                    steps = sum(s.counters.steps for s in sequences)
                    strides.append(sum(s.num_generated for s in sequences) / steps)
                    drafts.append(sum(map(sum, (s.counters.drafted for s in sequences))) / steps)
        found = {
            policy: spread([own / plain for own, plain in zip(each, paces[0], strict=True)])
            for policy, each in paces.items()
        }
        words = "   ".join(f"{policy}: {found[policy]}" for policy in policies if policy != 0)
        print(f"  {rows:3d} rows   {words}   stride {strides[-1]:.2f}, depth {drafts[-1]:.2f}", flush=True)
    print()


def _mixed(bench: StepBench, args: argparse.Namespace) -> None:
    """Speed of plain rows if the other half of the rows draft, and the cost of the wider forward pass."""
    print("plain rows if half of the rows draft: speed over an all-plain batch; cost of the wider forward")
    for rows in [n for n in args.rows if n > 1]:
        for depth in args.depths:
            paces = []
            for _ in range(args.rounds):
                plain, _ = bench.ours([0] * rows, args.tokens)
                mixed, _ = bench.ours([0, depth] * (rows // 2), args.tokens)
                paces.append((plain.seconds / plain.num_steps) / (mixed.seconds / mixed.num_steps))
            wide, narrow = bench.forward_ms(rows, 1 + depth), bench.forward_ms(rows, 1)
            print(
                f"  {rows:3d} rows  depth {depth}   speed {spread(paces)}   "
                f"forward [{rows},1] / [{rows},{1 + depth}] {narrow / wide:.2f}",
                flush=True,
            )
    print()


def _shares(sequences: list, depth: int) -> list[float]:
    drafted = [sum(s.counters.drafted[i] for s in sequences) for i in range(depth)]
    accepted = [sum(s.counters.accepted[i] for s in sequences) for i in range(depth)]
    return [a / max(1, d) for a, d in zip(accepted, drafted, strict=True)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="model folder or Hugging Face id (default: the default model)")
    parser.add_argument("--head", help="file of the MTP head (default: the head beside the model)")
    parser.add_argument("--prompts", type=Path, help="a JSON list of questions (default: the chat workload)")
    parser.add_argument("--draft-vocabulary", type=int, help="draft only from the N most frequent tokens")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--process-time",
        action="store_true",
        help="time the parts auto and depth by this process's CPU time, not by the wall clock",
    )
    parser.add_argument("--parts", nargs="+", default=["plain", "depth", "auto", "mixed"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
