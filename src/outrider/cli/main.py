"""The `outrider` command."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from outrider import __version__
from outrider.cli.models import add_models
from outrider.cli.mtp import add_mtp
from outrider.cli.serve import add_serve
from outrider.config import DRAFTERS, InvalidConfig
from outrider.models.errors import ModelUnavailable
from outrider.request import MAX_DEPTH, InvalidRequest


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    try:
        return int(args.run(args))
    except (InvalidConfig, InvalidRequest, ModelUnavailable) as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outrider", description="LLM inference on MLX with drafting rows.")
    parser.add_argument("--version", action="version", version=f"outrider {__version__}")
    parser.add_argument("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_serve(commands)
    _add_chat(commands)
    add_models(commands)
    add_mtp(commands)
    return parser


def _add_chat(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    chat = commands.add_parser("chat", help="talk to a model in the terminal")
    chat.add_argument(
        "model", nargs="?", help="model folder or Hugging Face id (default: SmolLM2-135M-Instruct)"
    )
    chat.add_argument("--drafter", choices=DRAFTERS, default="auto", help="where drafts come from")
    chat.add_argument("--head", help="MTP head file (default: the one beside the model)")
    chat.add_argument(
        "--draft-depth",
        type=_depth,
        default="auto",
        metavar="N",
        help=f'drafts a step: "auto" or 0..{MAX_DEPTH}',
    )
    chat.add_argument("--system", help="system message")
    chat.add_argument("--temperature", type=float, default=0.7)
    chat.add_argument("--top-p", type=float, default=0.95)
    chat.add_argument("--max-tokens", type=int, default=512)
    chat.add_argument("--seed", type=int)
    chat.set_defaults(run=_run_chat)


def _depth(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _run_chat(args: argparse.Namespace) -> int:
    from outrider.cli.chat import run_chat

    return run_chat(args)
