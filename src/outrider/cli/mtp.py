"""`outrider mtp`: inspect, extract and train heads. Owns the options and last words of `train`."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import fields
from pathlib import Path

from outrider.cli.mtp_extract import add_extract
from outrider.cli.mtp_inspect import add_inspect
from outrider.request import MAX_DEPTH
from outrider.train.errors import Interrupted, TrainingError
from outrider.train.settings import DEFAULT_STEPS, Settings

Commands = argparse._SubParsersAction  # of argparse.ArgumentParser


def add_mtp(commands: Commands[argparse.ArgumentParser]) -> None:
    mtp = commands.add_parser("mtp", help="MTP heads: look at one, take one out of a checkpoint, train one")
    verbs = mtp.add_subparsers(required=True, metavar="VERB")
    add_inspect(verbs)
    add_extract(verbs)
    train = verbs.add_parser(
        "train",
        help="train a head for a model, on its own answers",
        description="Trains an MTP head for a frozen model by self-distillation: the model makes up "
        "conversations, the head learns to guess what it says. It is found beside the model afterwards.",
    )
    _add_files(train)
    _add_settings(train)
    train.set_defaults(run=run_train)


def _add_files(train: argparse.ArgumentParser) -> None:
    train.add_argument("model", nargs="?", help="model folder, GGUF file or Hugging Face id")
    train.add_argument(
        "--out", type=Path, metavar="FILE", help="head file (default: mtp/weights.safetensors in the model)"
    )
    train.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='prompts, one a line or JSONL with "prompt" or "messages"',
    )
    train.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    train.add_argument("--force", action="store_true", help="replace an existing head or unfinished run")


def _add_settings(train: argparse.ArgumentParser) -> None:
    usual = Settings()

    def option(name: str, kind: type, metavar: str, text: str) -> None:
        train.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)

    option("conversations", int, "N", f"conversations to synthesise ({usual.conversations})")
    option("max-tokens", int, "N", f"longest answer in them ({usual.max_tokens})")
    option("steps", int, "N", f"training steps ({DEFAULT_STEPS}, unless --seconds is given)")
    option("seconds", float, "S", "train for this long")
    option("batch-tokens", int, "N", f"tokens a step learns from ({usual.batch_tokens})")
    option("depths", int, "N", f"drafts ahead to train for, 1..{MAX_DEPTH} ({usual.depths})")
    option("learning-rate", float, "R", f"of the matrices ({usual.learning_rate})")
    option("seed", int, "N", f"({usual.seed})")


def run_train(args: argparse.Namespace) -> int:
    from outrider.llm import default_model
    from outrider.train.progress import TrainingBar
    from outrider.train.report import render
    from outrider.train.run import Job, train_head

    asked = {one.name: getattr(args, one.name) for one in fields(Settings)}
    asked = {name: value for name, value in asked.items() if value is not None}
    bar = TrainingBar()
    try:
        model = default_model() if args.model is None else args.model
        job = Job(model, asked, args.out, args.prompts, args.resume, args.force)
        path, figures = train_head(job, bar)
    except TrainingError as error:
        bar.close()
        print(f"outrider: {error}", file=sys.stderr)
        return 2
    except Interrupted as stop:
        bar.close()
        print(f"Stopped {stop}. Go on with: {_resume_command(args)}", file=sys.stderr)
        return 130
    bar.close()
    print(render(figures, path))
    print(f"Try it: {_chat_command(args)}")
    return 0


def _chat_command(args: argparse.Namespace) -> str:
    words = ["outrider", "chat", *([args.model] if args.model else [])]
    return shlex.join([*words, *(["--head", str(args.out)] if args.out else [])])


def _resume_command(args: argparse.Namespace) -> str:
    words = ["outrider", "mtp", "train", *([args.model] if args.model else [])]
    if args.out:
        words += ["--out", str(args.out)]
    return shlex.join([*words, "--resume"])
