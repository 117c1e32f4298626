"""The options of `outrider bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.config import DRAFTERS, DTYPES
from outrider.request import MAX_DEPTH


def add_options(bench: argparse.ArgumentParser) -> None:
    bench.add_argument(
        "model",
        nargs="?",
        help="model folder, GGUF file or Hugging Face id (default: SmolLM2-135M-Instruct); "
        "with --url the model's name there (default: the server's first)",
    )
    _add_where(bench.add_argument_group("where"))
    _add_loading(bench.add_argument_group("a model loaded here"))
    _add_what(bench.add_argument_group("what is measured"))
    _add_results(bench.add_argument_group("results"))


def _add_where(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--http", action="store_true", help="start our server and ask it over HTTP")
    group.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="[NAME=]URL",
        help="a running server with OpenAI's API; several are measured in turns",
    )
    group.add_argument("--api-key", metavar="KEY", help="of the servers (default: OUTRIDER_API_KEY)")
    group.add_argument(
        "--pid",
        action="append",
        default=[],
        type=int,
        metavar="N",
        help="process of the server, one for each --url in its order: its memory is watched (Linux)",
    )
    group.add_argument("--timeout", type=float, metavar="S", help="longest silence of a server (300)")


def _add_loading(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--drafter", choices=DRAFTERS, help="where drafts come from (auto)")
    group.add_argument("--head", metavar="FILE", help="MTP head file (the one beside the model)")
    group.add_argument("--draft-vocabulary", type=int, metavar="N", help="draft from so many tokens only")
    group.add_argument("--dtype", choices=DTYPES, help="of weights (auto)")


def _add_what(group: argparse._ArgumentGroup) -> None:
    preset = group.add_mutually_exclusive_group()
    preset.add_argument("--quick", action="store_true", help="a look in under a minute: chat and json, short")
    preset.add_argument("--full", action="store_true", help="everything: hours on a small machine")
    group.add_argument(
        "--workloads",
        nargs="+",
        metavar="NAME",
        help="chat, code, json, long, shared, mixed (chat code json)",
    )
    group.add_argument("--streams", nargs="+", type=int, metavar="N", help="requests at once (1 4 8)")
    group.add_argument("--temperatures", nargs="+", type=float, metavar="T", help="(0)")
    group.add_argument("--rounds", type=int, metavar="N", help="turns of each arm at each case (3)")
    group.add_argument("--requests", type=int, metavar="N", help="answers of each stream in a round (2)")
    group.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (64)")
    group.add_argument(
        "--depths",
        nargs="+",
        type=_depth,
        metavar="N",
        help=f"drafts a step, each an arm beside depth 0: auto or 1..{MAX_DEPTH} (auto)",
    )
    group.add_argument("--seed", type=int, metavar="N", help="of sampled answers (1)")
    group.add_argument(
        "--baseline",
        action="append",
        default=[],
        metavar="ARM",
        help="ratios are over this arm; repeatable (drafts off, or the first server)",
    )


def _add_results(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", type=Path, metavar="FILE", help="write settings, versions and all rounds")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw it: FILE.svg, or FILE.png (cairosvg)")


def _depth(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not auto or a number") from None
