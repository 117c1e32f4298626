"""Compares servers that draft with the MTP head of one Qwen3.5 checkpoint: with MTP, without it, and beside
Outrider. Prints a markdown table of speeds and of equal answers.

    python -m benchmarks.native_mtp [MODEL] --servers mlx-vlm vllm-mlx=PEERS/bin/python [--rounds 5]

MODEL is a folder with model.safetensors, mtp.safetensors and held_out_prompts.json. Every server is started
twice, with MTP and without it, and stays until the end. All of them get the same weights in float32, the same
BLAS and the same questions, and take turns in every round. A server that does not start, refuses or crashes
is a row of the table. docs/BENCHMARKS.md says how the other servers are installed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.native_mtp.drafts import drafts_text, report
from benchmarks.native_mtp.kinds import OUTRIDER, PEERS, peer_of, read_choice, version_of
from benchmarks.native_mtp.layouts import CannotConvert, write_common_folder
from benchmarks.native_mtp.loads import loads_of
from benchmarks.native_mtp.measured import MeasuredServer
from benchmarks.native_mtp.results import as_json
from benchmarks.native_mtp.rounds import Rounds, Subject, equal_to_first
from benchmarks.native_mtp.table import table
from benchmarks.server_process import DidNotStart
from outrider.bench.environment import environment
from outrider.bench.workloads import Task
from outrider.files.cache_folder import cache_folder

TINY = Path(__file__).resolve().parents[2] / "tests" / "data" / "tiny-hybrid"
BEGAN_S = time.monotonic()


@dataclass(frozen=True)
class Place:
    """Where all servers find the model, and where they write."""

    folder: Path
    scratch: Path
    logs: Path

    @property
    def environ(self) -> dict[str, str]:
        """Some servers cache prompts in their home folder, from run to run; none may download or report."""
        off = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
        return {"HOME": str(self.scratch), "OUTRIDER_CACHE": str(cache_folder())} | off


def main() -> int:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped
    with tempfile.TemporaryDirectory(prefix="outrider-native-") as scratch, contextlib.ExitStack() as stack:
        try:
            folder = write_common_folder(args.model, Path(scratch) / "models" / args.model.name)
        except CannotConvert as error:
            sys.exit(str(error))
        place = Place(folder, Path(scratch), args.logs or Path(scratch))
        subjects = _launched(args, place, stack)
        for subject in subjects:
            _wait(subject)
        return asyncio.run(_measure(args, place, subjects))


def _launched(args: argparse.Namespace, place: Place, stack: contextlib.ExitStack) -> list[Subject]:
    """All servers are started at the same time, Outrider's first."""
    place.logs.mkdir(parents=True, exist_ok=True)
    subjects = []
    for kind, python in [
        (OUTRIDER, sys.executable),
        *((PEERS[name], python) for name, python in args.servers),
    ]:
        version = version_of(kind, python)
        subject = Subject(f"{kind.title} {version or '(not installed)'}", kind.package)
        subjects.append(subject)
        if version is None:
            subject.problems.append(f"{kind.package} is not installed for {python}")
            continue
        for has_mtp in (True, False):
            peer = peer_of(kind, python, place.folder, max(args.streams), has_mtp, place.environ)
            form = MeasuredServer(peer, has_mtp, str(place.folder), place.logs, args.timeout)
            stack.callback(form.stop)
            form.start()
            subject.forms.append(form)
    return subjects


def _wait(subject: Subject) -> None:
    """Until the server is ready. A form that does not start is given up."""
    for form in list(subject.forms):
        try:
            form.wait()
            _say(f"{form.name}: ready")
        except DidNotStart as error:
            _say(str(error))
            subject.problems.append(f"{form.name} does not start: {form.last_words()}")
            subject.forms.remove(form)


async def _measure(args: argparse.Namespace, place: Place, subjects: list[Subject]) -> int:
    tokenizer = Tokenizer.from_file(str(place.folder / "tokenizer.json"))
    loads = loads_of(args.streams)
    num_asked = args.rounds * max(load.num_requests for load in loads)
    tasks = [Task(text) for text in json.loads(args.prompts.read_text())[:num_asked]]
    rounds = Rounds(subjects, loads, tasks, args.tokens, lambda text: len(tokenizer.encode(text).ids), _say)
    await rounds.answer_alone()
    _say(f"{args.rounds} rounds of {rounds.expected_s():.0f} s each, if batches and MTP gain nothing")
    began_s = time.monotonic()
    try:
        for index in range(args.rounds):
            await rounds.run(index)
            mean_s = (time.monotonic() - began_s) / (index + 1)
            _say(f"round {index + 1} of {args.rounds}: {(args.rounds - index - 1) * mean_s:.0f} s left")
    except asyncio.CancelledError:
        _say("stopped: the table has the cells that were measured")
    if args.json is not None:
        args.json.write_text(json.dumps(_record(rounds, subjects), indent=1))
    problems = [
        (subject.name, text.replace(str(place.folder), "MODEL"))
        for subject in subjects
        for text in subject.problems
    ]
    print("\n" + table(rounds.cells, [subject.name for subject in subjects], loads, problems) + "\n")
    for subject in subjects:
        for form in subject.forms:
            if form.has_mtp:
                print(drafts_text(subject.name, report(subject.package, form.port, str(place.folder))))
    for name, (equal, count) in equal_to_first(subjects).items():
        print(f"{name}: {equal} of {count} plain answers alone are those of {subjects[0].name}.")
    return 0


def _record(rounds: Rounds, subjects: list[Subject]) -> dict[str, object]:
    return {
        "environment": environment(),
        "alone": {subject.name: subject.alone for subject in subjects},
        "problems": {subject.name: subject.problems for subject in subjects},
        "cells": [as_json(cell) for cell in rounds.cells],
    }


def _say(line: str) -> None:
    print(f"{time.monotonic() - BEGAN_S:6.0f} s  {line}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, default=TINY, help="(default: tests/data/tiny-hybrid)")
    parser.add_argument(
        "--servers",
        nargs="*",
        type=_choice,
        default=[],
        metavar="NAME[=PYTHON]",
        help=f"others than Outrider, each with the Python that has it: {', '.join(PEERS)}",
    )
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 2, 4, 8], help="(default: 1 2 4 8)")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer at most (default: 64)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for an answer (default: 60)")
    parser.add_argument("--prompts", type=Path, help="JSON list (default: held_out_prompts.json in MODEL)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all cells")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keeps the logs of the servers")
    args = parser.parse_args()
    args.prompts = args.prompts or args.model / "held_out_prompts.json"
    for flag, value in (
        ("--tokens", args.tokens),
        ("--rounds", args.rounds),
        ("--streams", min(args.streams)),
    ):
        if value < 1:
            parser.error(f"{flag}: {value} is not at least 1")
    if not args.prompts.is_file():
        parser.error(f"{args.prompts}: there is no such file; give one with --prompts")
    return args


def _choice(text: str) -> tuple[str, str]:
    try:
        return read_choice(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
