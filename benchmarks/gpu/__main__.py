"""The step at real sizes: random weights in published shapes and scripted acceptance, on MLX's device.

    python -m benchmarks.gpu --list
    python -m benchmarks.gpu --models 4b --dtypes bf16 --rows 1 8 32 --accept 70 --out gpu.json
    python -m benchmarks.gpu --models default --model FOLDER --only '*/loop/*'
    python -m benchmarks.gpu --models dense-4b 4b 35b-a3b --dtypes 4bit --only '*/wide'
    python -m benchmarks.gpu --tiny --steps 8 --seconds 2          # a machine without a GPU

--out is written after every cell. If a cell fails, its error is printed and the other cells go on. After
--deadline seconds no further cell starts.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import mlx.core as mx

from benchmarks.gpu.machine_cells import Machine
from benchmarks.gpu.model_cells import ModelCells, names_of
from benchmarks.gpu.settings import CellResult, CellSettings, say
from benchmarks.gpu.weights import DTYPES, random_subject, subject_from
from outrider.models import machine

MODELS = ("4b", "27b", "35b-a3b", "122b-a10b", "dense-4b", "default-shape", "default")
TINY_MODELS = {"4b", "27b", "35b-a3b", "dense-4b"}


class Report:
    """Runs cells and stores their results, also on disk."""

    def __init__(self, out: Path | None, deadline_s: float) -> None:
        self._out = out
        self._ends = time.perf_counter() + deadline_s
        self.found: CellResult = {"device": machine.device_name(), "mlx": mx.__version__, "cells": {}}
        self.failed: list[str] = []
        self.skipped: list[str] = []

    @property
    def is_late(self) -> bool:
        return time.perf_counter() > self._ends

    def run(self, name: str, cell: Callable[[], CellResult]) -> None:
        if self.is_late:
            self.skipped.append(name)
            return
        began = time.perf_counter()
        try:
            found = cell()
        except Exception as error:  # the other cells can still be measured
            traceback.print_exc(file=sys.stdout)
            self.failed.append(name)
            found = {"error": f"{type(error).__name__}: {error}"}
        found = {**found, "took_s": round(time.perf_counter() - began, 2)}
        self.found["cells"][name] = found
        say(f"{name} took {found['took_s']:.1f} s")
        if self._out is not None:
            self._out.write_text(json.dumps(self.found, indent=1))


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    settings = CellSettings(
        rows=args.rows,
        depths=args.depths,
        accept=args.accept,
        num_prompt=args.context,
        steps=args.steps,
        seconds=args.seconds,
        rounds=args.rounds,
        temperature=args.temperature,
        bandwidth_bytes=args.bandwidth_bytes,
        is_tiny=args.tiny,
    )
    here = Machine(settings)
    models = _models(args)
    wanted = [name for name in here.cells() if _is_wanted(name, args.only)]
    by_model = {
        key: [name for name in names_of(*key, settings) if _is_wanted(name, args.only)] for key in models
    }
    if args.list:
        print("\n".join([*wanted, *(name for names in by_model.values() for name in names)]))
        return 0
    machine.settle()
    report = Report(args.out, args.deadline)
    say(f"{report.found['device']}, mlx {report.found['mlx']}, {vars(args)}")
    for name in wanted:
        report.run(name, here.cells()[name])
    for key, names in by_model.items():
        if names:
            _run_model(key, names, settings, here, report, args.model)
    for kind, names in (("failed", report.failed), ("not started in time", report.skipped)):
        if names:
            say(f"{kind}: {', '.join(names)}")
    return 1 if report.failed else 0


def _run_model(
    key: tuple[str, str], names: list[str], settings: CellSettings, here: Machine, report: Report, folder: str
) -> None:
    cells: ModelCells | None = None

    def load() -> CellResult:
        nonlocal cells
        subject = subject_from(Path(folder)) if key[0] == "default" else random_subject(*key)
        cells = ModelCells(subject, settings, here)
        return cells.run(f"{key[0]}/{key[1]}/about")

    report.run(f"{key[0]}/{key[1]}/about", load)
    for name in names:
        if cells is not None and not name.endswith("/about"):
            report.run(name, lambda name=name: cells.run(name))  # type: ignore[misc]
    say(f"peak memory {mx.get_peak_memory() / 1e9:.2f} GB")
    cells = None
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()


def _models(args: argparse.Namespace) -> list[tuple[str, str]]:
    found = []
    for name in args.models:
        if name == "default":
            found.append((name, "own"))
        else:
            found += [(f"tiny-{name}" if args.tiny else name, dtype) for dtype in args.dtypes]
    return found


def _is_wanted(name: str, patterns: list[str] | None) -> bool:
    return not patterns or any(fnmatch(name, pattern) for pattern in patterns)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["4b"])
    parser.add_argument("--model", help="model folder for --models default")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--tiny", action="store_true", help="use tiny models of the same families")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--accept",
        type=int,
        nargs="+",
        default=[70],
        help="percent of drafts that are accepted (default: 70)",
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--context", type=int, default=256, help="prompt tokens of every row (default: 256)")
    parser.add_argument("--steps", type=int, default=64, help="most steps of a run (default: 64)")
    parser.add_argument(
        "--seconds", type=float, default=12.0, help="most seconds of decoding in a cell (default: 12)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--bandwidth-bytes", type=int, help="size of the array that bandwidth is measured with"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="PATTERN", help="run only these cells; --list prints the names"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cells and stop")
    parser.add_argument(
        "--deadline", type=float, default=520.0, help="seconds after which no cell starts (default: 520)"
    )
    parser.add_argument("--out", type=Path, help="JSON file, written after every cell")
    args = parser.parse_args(argv)
    if "default" in args.models and not args.model:
        parser.error("--models default needs a folder: --model FOLDER")
    if args.tiny and not TINY_MODELS.issuperset(args.models):
        parser.error(f"--tiny is only for {', '.join(sorted(TINY_MODELS))}")
    if 0 in args.depths:
        parser.error("depth 0 is always measured: leave it out of --depths")
    if args.bandwidth_bytes is None:
        args.bandwidth_bytes = (64 << 20) if machine.device_name() == "cpu" else (2 << 30)
    return args


if __name__ == "__main__":
    sys.exit(main())
