"""`outrider chat`: a conversation in the terminal, with a model in this process or with a server.

Owns the options and what stands behind them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from outrider.config import DRAFTERS, InvalidConfig
from outrider.request import MAX_DEPTH, SamplingParams

if TYPE_CHECKING:
    from outrider.cli.chat_backends import Backend

Commands = argparse._SubParsersAction  # of argparse.ArgumentParser


def add_chat(commands: Commands[argparse.ArgumentParser]) -> None:
    chat = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="A conversation in the terminal: with a model that is loaded for it, or with a running "
        "server (--url). On a terminal, unless NO_COLOR is set, the markdown of answers is rendered.",
    )
    chat.add_argument(
        "model",
        nargs="?",
        help="model folder or Hugging Face id (default: SmolLM2-135M-Instruct); "
        "with --url the model's name there (default: the server's first)",
    )
    _add_server(chat.add_argument_group("a running server"))
    _add_loading(chat.add_argument_group("a model loaded here"))
    _add_answers(chat.add_argument_group("answers"))
    chat.set_defaults(run=run_chat)


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--url", help="talk to this server, e.g. http://127.0.0.1:8000")
    group.add_argument("--api-key", metavar="KEY", help="its key (default: OUTRIDER_API_KEY)")


def _add_loading(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--drafter", choices=DRAFTERS, help="where drafts come from (auto)")
    group.add_argument("--head", metavar="FILE", help="MTP head file (default: the one beside the model)")


def _add_answers(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--system", metavar="TEXT", help="system message")
    group.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0: greedy (%(default)s)")
    group.add_argument("--top-p", type=float, default=0.95, metavar="P", help="(%(default)s)")
    group.add_argument(
        "--max-tokens", type=int, default=512, metavar="N", help="longest answer (%(default)s)"
    )
    group.add_argument("--seed", type=int, metavar="N", help="(default: another one for each answer)")
    group.add_argument(
        "--draft-depth",
        type=_depth,
        default="auto",
        metavar="N",
        help=f'drafts a step: "auto" or 0..{MAX_DEPTH} (auto)',
    )


def _depth(text: str) -> int | str:
    return text if text == "auto" else int(text)


def run_chat(args: argparse.Namespace) -> int:
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        draft_depth=args.draft_depth,
    )
    _check_sides(args)
    _prepare_terminal()
    with _server(args, params) if args.url else _local(args, params) as backend:
        _converse(backend, args.system)
    return 0


def _converse(backend: Backend, system: str | None) -> None:
    from outrider.cli.chat_loop import ChatLoop
    from outrider.cli.chat_screen import ChatScreen
    from outrider.cli.terminal import wants_styles

    ChatLoop(backend, ChatScreen(sys.stdout, wants_styles(sys.stdout)), system).run()


def _check_sides(args: argparse.Namespace) -> None:
    """Options of a model loaded here say nothing to a server, and the other way round."""
    if args.url and (args.drafter or args.head):
        raise InvalidConfig("--drafter and --head are for a model loaded here; the server has its own")
    if args.api_key and not args.url:
        raise InvalidConfig("--api-key is for a server: name it with --url")


@contextlib.contextmanager
def _local(args: argparse.Namespace, params: SamplingParams) -> Iterator[Backend]:
    from outrider.cli.chat_backends import LocalBackend
    from outrider.llm import LLM

    with (
        LLM(args.model, drafter=args.drafter or "auto", head=args.head) as llm,
        contextlib.closing(LocalBackend(llm, params)) as backend,
    ):
        yield backend


@contextlib.contextmanager
def _server(args: argparse.Namespace, params: SamplingParams) -> Iterator[Backend]:
    from outrider.cli.chat_backends import ChatFailed
    from outrider.cli.chat_server import ServerBackend, first_model
    from outrider.server_address import ServerAddress

    address = ServerAddress.parse(args.url, args.api_key or os.environ.get("OUTRIDER_API_KEY"))
    try:
        model = args.model or first_model(address)
    except ChatFailed as error:
        raise InvalidConfig(str(error)) from None
    yield ServerBackend(address, model, params)


def _prepare_terminal() -> None:
    """Line editing where there is any; characters that the terminal's encoding lacks become marks."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
