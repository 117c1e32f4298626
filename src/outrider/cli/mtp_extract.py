"""`outrider mtp extract`: copies the MTP head of an original checkpoint to a converted model."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from outrider.config import DEFAULT_HEAD_GROUP_SIZE, HEAD_BITS, HEAD_GROUP_SIZES, InvalidConfig

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
    add_quantization(extract)
    extract.add_argument("--force", action="store_true", help="replace a head that is already there")
    extract.set_defaults(run=run_extract)


def add_quantization(command: argparse.ArgumentParser) -> None:
    """The options of a command that writes a head file."""
    command.add_argument(
        "--bits", type=int, choices=HEAD_BITS, help="quantise the head's linear layers (default: do not)"
    )
    command.add_argument(
        "--group-size",
        type=int,
        choices=HEAD_GROUP_SIZES,
        help=f"weights that share a scale, with --bits (default: {DEFAULT_HEAD_GROUP_SIZE})",
    )


def run_extract(args: argparse.Namespace) -> int:
    from outrider.models.heads import Quantization
    from outrider.models.heads.extract import extract
    from outrider.models.heads.originals import original
    from outrider.progress import ProgressBar

    if args.group_size is not None and args.bits is None:
        raise InvalidConfig("--group-size needs --bits.")
    how = None if args.bits is None else Quantization(args.bits, args.group_size or DEFAULT_HEAD_GROUP_SIZE)
    bar = ProgressBar()
    try:
        source = original(args.source, args.revision)
        done = extract(source, args.into.expanduser(), args.force, bar, how)
    finally:
        bar.close()
    depths = "one layer" if done.num_depths == 1 else f"{done.num_depths} layers"
    print(
        f"Wrote {done.file}: {done.num_tensors} tensors, {done.num_bytes / 1e6:.1f} MB, "
        f"layout {done.layout}, {depths}."
    )
    if done.quantized is not None:
        print(done.quantized.describe(done.num_bytes_before, done.num_bytes))
    if source.commit is not None:
        print(f"Taken from {source.name} at commit {source.commit} (--revision {source.commit} fixes it).")
    print(f"Measure its speed-up: {shlex.join(['outrider', 'mtp', 'inspect', str(args.into)])}")
    return 0
