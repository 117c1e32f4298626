"""`outrider chat`: a conversation in the terminal, with a model in this process or with a server."""

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
        description="A conversation in the terminal, with a model that this command loads or with a "
        "running server (--url). A terminal shows the markdown of the answers with styles; set NO_COLOR for "
        "plain text.",
    )
    chat.add_argument(
        "model",
        nargs="?",
        help="model folder, GGUF file or Hugging Face id (default: SmolLM2-135M-Instruct); "
        "with --url, the model's name on the server (default: the first one that the server lists)",
    )
    server = chat.add_argument_group("with a running server")
    server.add_argument("--url", help="address of a server with OpenAI's API, such as http://127.0.0.1:8000")
    server.add_argument("--api-key", metavar="KEY", help="key of the server (default: $OUTRIDER_API_KEY)")
    loading = chat.add_argument_group("with a model that this command loads")
    loading.add_argument("--drafter", choices=DRAFTERS, help="source of draft tokens (default: auto)")
    loading.add_argument(
        "--head", metavar="FILE", help="file of the MTP head (default: the head beside the model)"
    )
    _add_answers(chat.add_argument_group("answers"))
    chat.set_defaults(run=run_chat)


def _add_answers(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--system", metavar="TEXT", help="system message (default: none)")
    group.add_argument(
        "--temperature", type=float, default=0.7, metavar="T", help="0 is greedy (default: %(default)s)"
    )
    group.add_argument(
        "--top-p", type=float, default=0.95, metavar="P", help="nucleus sampling (default: %(default)s)"
    )
    group.add_argument(
        "--max-tokens", type=int, default=512, metavar="N", help="longest answer (default: %(default)s)"
    )
    group.add_argument("--seed", type=int, metavar="N", help="random seed (default: a new one per answer)")
    group.add_argument(
        "--draft-depth",
        type=_depth,
        default="auto",
        metavar="N",
        help=f"draft tokens per step, 0 to {MAX_DEPTH}, or auto (default: auto)",
    )


def _depth(text: str) -> int | str:
    return text if text == "auto" else int(text)


def run_chat(args: argparse.Namespace) -> int:
    from outrider.cli.chat_loop import ChatLoop
    from outrider.cli.chat_screen import ChatScreen
    from outrider.terminal import wants_styles

    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        draft_depth=args.draft_depth,
    )
    _check_options(args)
    with contextlib.suppress(ImportError):  # line editing, if Python has it
        import readline  # noqa: F401
    if isinstance(sys.stdout, io.TextIOWrapper):  # "?" for characters that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="replace")
    with _server(args, params) if args.url else _local(args, params) as backend:
        ChatLoop(backend, ChatScreen(sys.stdout, wants_styles(sys.stdout)), args.system).run()
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Some options are for a model that is loaded here, others for a server."""
    if args.url and (args.drafter or args.head):
        raise InvalidConfig(
            "--drafter and --head are for a model loaded here; the server of --url has its own"
        )
    if args.api_key and not args.url:
        raise InvalidConfig("--api-key is for a server: give its address with --url")


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
    from outrider.cli.chat_server import ServerBackend
    from outrider.server_address import ServerAddress

    address = ServerAddress.parse(args.url, args.api_key or os.environ.get("OUTRIDER_API_KEY"))
    try:
        backend = ServerBackend(address, args.model, params)
    except ChatFailed as error:
        raise InvalidConfig(str(error)) from None
    with contextlib.closing(backend):
        yield backend
