"""The options of `outrider bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.config import DRAFTERS, DTYPES, KV_BITS
from outrider.request import MAX_DEPTH


def add_options(bench: argparse.ArgumentParser) -> None:
    bench.add_argument(
        "model",
        nargs="?",
        help="model folder, GGUF file or Hugging Face id (default: SmolLM2-135M-Instruct); "
        "with --url, the model's name on the server (default: the first one that the server lists)",
    )
    _add_servers(bench.add_argument_group("servers"))
    _add_loading(bench.add_argument_group("a model that this command loads, also with --http"))
    _add_load(bench.add_argument_group("what is measured"))
    _add_results(bench.add_argument_group("results"))


def _add_servers(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--http", action="store_true", help="start `outrider serve` and measure it over HTTP")
    group.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="[NAME=]URL",
        help="measure a running server with OpenAI's API; give the option again to compare several servers",
    )
    group.add_argument("--api-key", metavar="KEY", help="key of the servers (default: $OUTRIDER_API_KEY)")
    group.add_argument(
        "--pid",
        action="append",
        default=[],
        type=int,
        metavar="N",
        help="process id of a server, to measure its memory (Linux); one for each --url, in the same order",
    )
    group.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="give up after S seconds without a byte from a server (default: 300)",
    )


def _add_loading(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--drafter", choices=DRAFTERS, help="source of draft tokens (default: auto)")
    group.add_argument(
        "--head", metavar="FILE", help="file of the MTP head (default: the head beside the model)"
    )
    group.add_argument(
        "--draft-model", metavar="MODEL", help="smaller model with the same tokenizer, which drafts"
    )
    group.add_argument(
        "--draft-vocabulary", type=int, metavar="N", help="draft only from the N most frequent tokens"
    )
    group.add_argument("--dtype", choices=DTYPES, help="data type of the weights (default: auto)")
    group.add_argument(
        "--kv-bits", type=int, choices=KV_BITS, help="bits of keys and values (default: as `outrider serve`)"
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    preset = group.add_mutually_exclusive_group()
    preset.add_argument(
        "--quick", action="store_true", help="short answers to chat and json: less than a minute"
    )
    preset.add_argument(
        "--full", action="store_true", help="all workloads, long answers: hours on a small machine"
    )
    group.add_argument(
        "--workloads",
        nargs="+",
        metavar="NAME",
        help="chat, code, json, long, arrivals, shared, uneven, mixed (default: chat code json)",
    )
    group.add_argument(
        "--streams", nargs="+", type=int, metavar="N", help="concurrent requests (default: 1 4 8)"
    )
    group.add_argument(
        "--temperatures", nargs="+", type=float, metavar="T", help="sampling temperatures (default: 0)"
    )
    group.add_argument("--rounds", type=int, metavar="N", help="rounds of each variant (default: 3)")
    group.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help="runs of each round, with the same questions; the fastest one of each variant counts, so that "
        "other processes disturb the figures less (default: 1)",
    )
    group.add_argument("--requests", type=int, metavar="N", help="requests per stream and round (default: 2)")
    group.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (default: 64)")
    group.add_argument(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help="length of the long prompts of the workloads long, arrivals and uneven, about, in tokens "
        "(default: 700, 4000 and 6000)",
    )
    group.add_argument(
        "--depths",
        nargs="+",
        type=_depth,
        metavar="N",
        help=f"draft tokens per step, 1 to {MAX_DEPTH}, or auto (default: auto); each value is a variant, "
        "and one without drafts is always measured",
    )
    group.add_argument("--seed", type=int, metavar="N", help="seed of sampled answers (default: 1)")
    group.add_argument(
        "--baseline",
        action="append",
        default=[],
        metavar="VARIANT",
        help="show ratios over this variant; may be given again (default: the first variant: "
        "without drafts, or the first server)",
    )


def _add_results(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--json", type=Path, metavar="FILE", help="write settings, versions, figures and all rounds as JSON"
    )
    group.add_argument(
        "--plot", type=Path, metavar="FILE", help="write a plot as .svg or .png (needs outrider[plot])"
    )


def _depth(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not auto or a number") from None
