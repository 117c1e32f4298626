"""`outrider mtp extract`: take a head out of an original, for a model that was converted without it."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

Verbs = argparse._SubParsersAction  # of argparse.ArgumentParser


def add_extract(verbs: Verbs[argparse.ArgumentParser]) -> None:
    extract = verbs.add_parser(
        "extract",
        help="take a head out of an original checkpoint",
        description="Most conversions to MLX leave a model's MTP head behind. This fetches the files of the "
        "original that hold it, and only those, and writes the head beside the converted model.",
    )
    extract.add_argument("source", help="the original: a folder, or a Hugging Face id")
    extract.add_argument("--into", type=Path, required=True, metavar="MODEL_DIR", help="the converted model")
    extract.add_argument("--force", action="store_true", help="replace a head that is there")
    extract.set_defaults(run=run_extract)


def run_extract(args: argparse.Namespace) -> int:
    from outrider.models.files.progress import TerminalBar
    from outrider.models.heads.extract import extract
    from outrider.models.heads.originals import original

    bar = TerminalBar()
    try:
        done = extract(original(args.source), args.into.expanduser(), args.force, bar)
    finally:
        bar.close()
    depths = "one layer" if done.num_depths == 1 else f"{done.num_depths} layers"
    print(
        f"Wrote {done.file}: {done.num_tensors} tensors, {done.num_bytes / 1e6:.1f} MB, "
        f"layout {done.layout}, {depths}."
    )
    print(f"See what it gains: {shlex.join(['outrider', 'mtp', 'inspect', str(args.into)])}")
    return 0
