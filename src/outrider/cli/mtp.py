"""`outrider mtp`: inspects, extracts and trains MTP heads. The options and the output of `train` are here."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import fields
from pathlib import Path

from outrider.cli.mtp_extract import add_extract, add_quantization
from outrider.cli.mtp_inspect import add_inspect
from outrider.request import MAX_DEPTH
from outrider.train.errors import Interrupted, TrainingError
from outrider.train.settings import DEFAULT_STEPS, TrainingSettings

Commands = argparse._SubParsersAction  # of argparse.ArgumentParser


def add_mtp(commands: Commands[argparse.ArgumentParser]) -> None:
    mtp = commands.add_parser(
        "mtp",
        help="inspect, extract or train an MTP head",
        description="An MTP head drafts tokens for a model. These commands inspect the head of a model, "
        "extract a head from an original checkpoint, or train one.",
    )
    verbs = mtp.add_subparsers(required=True, metavar="VERB")
    add_inspect(verbs)
    add_extract(verbs)
    train = verbs.add_parser(
        "train",
        help="train a head for a model on the model's own answers",
        description="Trains an MTP head for a frozen model by self-distillation: the model writes "
        "conversations, and the head learns to predict them. The head is stored beside the model, where the "
        "other commands find it.",
    )
    _add_files(train)
    _add_settings(train)
    train.set_defaults(run=run_train)


def _add_files(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "model", nargs="?", help="model folder, GGUF file or Hugging Face id (default: SmolLM2-135M-Instruct)"
    )
    train.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="head file (default: mtp/weights.safetensors in the model's folder)",
    )
    train.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='prompts, one per line, or JSON lines with "prompt" or "messages"',
    )
    train.add_argument("--resume", action="store_true", help="continue an interrupted run")
    train.add_argument("--force", action="store_true", help="replace an existing head or unfinished run")


def _add_settings(train: argparse.ArgumentParser) -> None:
    defaults = TrainingSettings()

    def option(name: str, kind: type, metavar: str, text: str) -> None:
        train.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)

    option("conversations", int, "N", f"conversations to synthesise (default: {defaults.conversations})")
    option("max-tokens", int, "N", f"longest answer in them (default: {defaults.max_tokens})")
    option("steps", int, "N", f"training steps (default: {DEFAULT_STEPS}, unless --seconds is given)")
    option("seconds", float, "S", "train for S seconds instead of a number of steps")
    option("batch-tokens", int, "N", f"tokens per training step (default: {defaults.batch_tokens})")
    option("depths", int, "N", f"draft positions to train, 1 to {MAX_DEPTH} (default: {defaults.depths})")
    option("learning-rate", float, "R", f"learning rate of the matrices (default: {defaults.learning_rate})")
    option("seed", int, "N", f"random seed (default: {defaults.seed})")
    add_quantization(train)


def run_train(args: argparse.Namespace) -> int:
    from outrider.llm import default_model
    from outrider.progress import ProgressBar
    from outrider.train.report import render
    from outrider.train.run import Job, train_head

    given = {one.name: getattr(args, one.name) for one in fields(TrainingSettings)}
    given = {name: value for name, value in given.items() if value is not None}
    bar = ProgressBar()
    try:
        model = default_model() if args.model is None else args.model
        job = Job(model, given, args.out, args.prompts, args.resume, args.force)
        path, figures = train_head(job, bar)
    except TrainingError as error:
        bar.close()
        print(f"outrider: {error}", file=sys.stderr)
        return 2
    except Interrupted as stop:
        bar.close()
        command = _command(args, "mtp train", "--out")
        print(f"Stopped {stop}. Continue with: {command} --resume", file=sys.stderr)
        return 130
    bar.close()
    print(render(figures, path))
    print(f"Try it: {_command(args, 'chat', '--head')}")
    return 0


def _command(args: argparse.Namespace, verb: str, head_flag: str) -> str:
    """An `outrider` command with the same model and head file."""
    model, head = [args.model] if args.model else [], [head_flag, str(args.out)] if args.out else []
    return shlex.join(["outrider", *verb.split(), *model, *head])
