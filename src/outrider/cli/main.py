"""The `outrider` command."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from outrider import __version__
from outrider.cli.bench import add_bench
from outrider.cli.chat import add_chat
from outrider.cli.doctor.command import add_doctor
from outrider.cli.greeting import greet
from outrider.cli.keys import add_keys
from outrider.cli.launch.command import LOG_LEVELS, add_launch, split_arguments
from outrider.cli.model_commands import add_model_commands
from outrider.cli.models import add_models
from outrider.cli.mtp import add_mtp
from outrider.cli.running_models import add_running_models
from outrider.cli.serve import add_serve
from outrider.config import InvalidConfig
from outrider.models.errors import ModelUnavailable
from outrider.request import InvalidRequest


def main(argv: Sequence[str] | None = None) -> int:
    words, tool_arguments = split_arguments(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(words)
    args.tool_arguments = tool_arguments
    # The same program again, in another process, for the supervisor of `serve`.
    args.command = sys.orig_argv[1:] if argv is None else ["-m", "outrider", *argv]
    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    try:
        return int(args.run(args))
    except (InvalidConfig, InvalidRequest, ModelUnavailable) as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has stopped, as in `outrider models | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outrider",
        description="Runs large language models on MLX: a server, a chat and tools.",
    )
    parser.add_argument("--version", action="version", version=f"outrider {__version__}")
    parser.add_argument(
        "--log-level",
        default="warning",
        choices=LOG_LEVELS,
        help="least severe messages to print (default: %(default)s)",
    )
    parser.set_defaults(run=greet)
    commands = parser.add_subparsers(metavar="COMMAND")
    add_serve(commands)
    add_chat(commands)
    add_launch(commands)
    add_model_commands(commands)
    add_running_models(commands)
    add_models(commands)
    add_keys(commands)
    add_mtp(commands)
    add_bench(commands)
    add_doctor(commands)
    return parser
