"""`outrider chat`: a conversation in the terminal, with a model in this process or with a server."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outrider.config import DRAFTERS, GENERATION_CONFIGS, InvalidConfig
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
    loading.add_argument(
        "--draft-model", metavar="MODEL", help="smaller model with the same tokenizer, which drafts"
    )
    loading.add_argument(
        "--generation-config",
        choices=GENERATION_CONFIGS,
        help="auto: sampling defaults of the model's generation_config.json; none: without (default: auto)",
    )
    _add_answers(chat.add_argument_group("answers"))
    chat.set_defaults(run=run_chat)


def _add_answers(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--system", metavar="TEXT", help="system message (default: none)")
    group.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0 is greedy (default: the server's, or the model's generation_config.json, else 1)",
    )
    group.add_argument(
        "--top-p", type=float, metavar="P", help="nucleus sampling (default: as for --temperature)"
    )
    group.add_argument(
        "--max-tokens", type=int, default=512, metavar="N", help="longest answer (default: %(default)s)"
    )
    group.add_argument("--seed", type=int, metavar="N", help="random seed (default: a new one per answer)")
    group.add_argument(
        "--draft-depth",
        type=_depth,
        metavar="N",
        help=f"draft tokens per step, 0 to {MAX_DEPTH}, or auto (default: auto)",
    )


def _depth(text: str) -> int | None:
    """None is "auto"."""
    return None if text == "auto" else int(text)


def run_chat(args: argparse.Namespace) -> int:
    from outrider.cli.chat_loop import ChatLoop
    from outrider.cli.chat_screen import ChatScreen
    from outrider.terminal import wants_styles

    chosen = _chosen(args)
    SamplingParams(**chosen)  # a bad value is reported before a model is loaded
    _check_options(args)
    with contextlib.suppress(ImportError):  # line editing, if Python has it
        import readline  # noqa: F401
    if isinstance(sys.stdout, io.TextIOWrapper):  # "?" for characters that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="replace")
    with _server(args, chosen) if args.url else _local(args, chosen) as backend:
        ChatLoop(backend, ChatScreen(sys.stdout, wants_styles(sys.stdout)), args.system).run()
    return 0


def _chosen(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that the user gave; the model or the server decides about the others."""
    names = ("max_tokens", "temperature", "top_p", "seed", "draft_depth")
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _check_options(args: argparse.Namespace) -> None:
    """Some options are for a model that is loaded here, others for a server."""
    if args.url and (args.drafter or args.head or args.draft_model or args.generation_config):
        raise InvalidConfig(
            "--drafter, --head, --draft-model and --generation-config are for a model loaded here; the "
            "server of --url has its own"
        )
    if args.api_key and not args.url:
        raise InvalidConfig("--api-key is for a server: give its address with --url")


@contextlib.contextmanager
def _local(args: argparse.Namespace, chosen: dict[str, Any]) -> Iterator[Backend]:
    from outrider.cli.chat_backends import LocalBackend
    from outrider.llm import LLM

    options = {
        "drafter": args.drafter or "auto",
        "head": args.head,
        "draft_model": args.draft_model,
        "generation_config": args.generation_config or "auto",
    }
    with LLM(args.model, **options) as llm:
        params = replace(llm.get_default_sampling_params(), **chosen)
        with contextlib.closing(LocalBackend(llm, params)) as backend:
            yield backend


@contextlib.contextmanager
def _server(args: argparse.Namespace, chosen: dict[str, Any]) -> Iterator[Backend]:
    from outrider.cli.chat_backends import ChatFailed
    from outrider.cli.chat_server import ServerBackend
    from outrider.server_address import ServerAddress

    address = ServerAddress.parse(args.url, args.api_key or os.environ.get("OUTRIDER_API_KEY"))
    try:
        backend = ServerBackend(address, args.model, chosen)
    except ChatFailed as error:
        raise InvalidConfig(str(error)) from None
    with contextlib.closing(backend):
        yield backend
