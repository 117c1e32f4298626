"""`outrider mtp extract`: copies the MTP head of an original checkpoint to a converted model."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

Verbs = argparse._SubParsersAction  # of argparse.ArgumentParser


def add_extract(verbs: Verbs[argparse.ArgumentParser]) -> None:
    extract = verbs.add_parser(
        "extract",
        help="copy the head of an original checkpoint to a converted model",
        description="Most conversions to MLX leave out a model's MTP head. This command downloads those "
        "files of the original checkpoint that hold the head, no others, and writes the head beside the "
        "converted model.",
    )
    extract.add_argument("source", help="the original checkpoint: a folder or a Hugging Face id")
    extract.add_argument(
        "--into", type=Path, required=True, metavar="MODEL_DIR", help="folder of the converted model"
    )
    extract.add_argument(
        "--revision", metavar="REVISION", help="commit, tag or branch of a Hugging Face id (main)"
    )
    extract.add_argument("--force", action="store_true", help="replace a head that is already there")
    extract.set_defaults(run=run_extract)


def run_extract(args: argparse.Namespace) -> int:
    from outrider.models.heads.extract import extract
    from outrider.models.heads.originals import original
    from outrider.progress import ProgressBar

    bar = ProgressBar()
    try:
        source = original(args.source, args.revision)
        done = extract(source, args.into.expanduser(), args.force, bar)
    finally:
        bar.close()
    depths = "one layer" if done.num_depths == 1 else f"{done.num_depths} layers"
    print(
        f"Wrote {done.file}: {done.num_tensors} tensors, {done.num_bytes / 1e6:.1f} MB, "
        f"layout {done.layout}, {depths}."
    )
    if source.commit is not None:
        print(f"Taken from {source.name} at commit {source.commit} (--revision {source.commit} fixes it).")
    print(f"Measure its speed-up: {shlex.join(['outrider', 'mtp', 'inspect', str(args.into)])}")
    return 0
