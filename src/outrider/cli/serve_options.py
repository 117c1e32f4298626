"""The options of `outrider serve`: one table of names, help and parsers (option_values.py).

`option_sources` reads their values. Must not know what the values do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider.cli.foreign_flags import add_foreign_flags
from outrider.cli.option_values import (
    depth,
    duration,
    kv_bits,
    number,
    one_of,
    seconds,
    size_bytes,
    whole_number,
)
from outrider.config import CACHE_LAYOUTS, DRAFTERS, DTYPES, GENERATION_CONFIGS, KV_BITS, RANK_HEADS
from outrider.request import MAX_DEPTH

PREFIX = "OUTRIDER_"
MTP = ("auto", "wanted", "on", "off")
LOG_FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
_KV_BITS = ", ".join(map(str, KV_BITS))


@dataclass(frozen=True)
class Option:
    """One setting. A switch takes no value. A list takes several: by commas, or by repeated flags."""

    name: str
    help: str
    parse: Callable[[str], Any] = str
    default: Any = None
    metavar: str = ""  # "": by the kind of the value, such as N or SIZE
    is_switch: bool = False
    is_list: bool = False
    takes_words: bool = False  # a list whose flag takes several words: --flag a b, as in vLLM

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        return PREFIX + self.key.upper()

    @property
    def flag(self) -> str:
        return f"--{self.name}"


MODEL = Option(
    "model",
    "model folder, GGUF file, Hugging Face id, outrider-vision-135m, all-minilm-l6-v2, or the NAME of a "
    "[models.NAME] table (default: SmolLM2-135M-Instruct). Of several models, a request names one",
)

METAVARS: dict[Callable[[str], Any], str] = {
    whole_number: "N",
    number: "X",
    depth: "N",
    size_bytes: "SIZE",
    seconds: "S",
    duration: "TIME",
}
GROUPS: dict[str, tuple[Option, ...]] = {
    "server": (
        Option("host", "address to listen on (127.0.0.1)", default="127.0.0.1", metavar="HOST"),
        Option("port", "port to listen on; 0: any free port (8000)", whole_number, 8000, "PORT"),
        Option("api-key", "key that clients must send; OUTRIDER_API_KEY hides it from `ps`", metavar="KEY"),
        Option("api-keys-file", "file of several keys, made by `outrider keys new`", metavar="FILE"),
        Option(
            "operator-key", "key for /metrics, /v1/status and DELETE /v1/cache (the API key)", metavar="KEY"
        ),
        Option("allow-public-without-key", "allow a public --host without a key", is_switch=True),
        Option(
            "served-model-name",
            "names of the model in the API (its folder's)",
            metavar="NAME",
            is_list=True,
            takes_words=True,
        ),
        Option("any-model-name", "serve the model under any name that a request has", is_switch=True),
        Option(
            "allowed-hosts",
            "further name under which clients reach the server, such as example.org; *: any",
            metavar="NAME",
            is_list=True,
        ),
        Option("no-page", "serve no web page at / and /docs", is_switch=True),
        Option("cors-origin", "web origin that may call the API; *: any", metavar="ORIGIN", is_list=True),
        Option("tls-cert", "file of the certificate chain (PEM): serve https", metavar="FILE"),
        Option("tls-key", "file of the certificate's private key (in --tls-cert)", metavar="FILE"),
        Option(
            "otlp-endpoint", "OpenTelemetry collector for traces: http://localhost:4318 (none)", metavar="URL"
        ),
        Option("log-level", "debug, info, warning or error (info)", one_of(*LEVELS), metavar="LEVEL"),
        Option(
            "log-format",
            "text, or json: one object per line (text)",
            one_of(*LOG_FORMATS),
            "text",
            "|".join(LOG_FORMATS),
        ),
        Option("no-supervisor", "serve in one process, which nothing restarts", is_switch=True),
    ),
    "several models": (
        Option(
            "models-dir",
            "folder: serve every model folder and GGUF file in it; cached: all of `outrider list` (none)",
            metavar="DIR",
        ),
        Option(
            "memory-limit",
            "memory of all models together, such as 16GB (all that is free)",
            size_bytes,
        ),
        Option("pin", "model that is loaded at the start and never unloaded", metavar="NAME", is_list=True),
        Option(
            "idle-unload",
            "unload a model that no request has used for so long, such as 10m; 0: never (0)",
            duration,
            0.0,
        ),
    ),
    "drafts": (
        Option(
            "mtp",
            "draft with the MTP head. auto: if the model has one; wanted: warn, on: refuse to start, without "
            "one (auto)",
            one_of(*MTP),
            "auto",
            "|".join(MTP),
        ),
        Option("draft-depth", f"draft tokens per step: auto or 0..{MAX_DEPTH} (auto)", depth),
        Option(
            "drafter", f"source of drafts: {', '.join(DRAFTERS)} (auto)", one_of(*DRAFTERS), "auto", "NAME"
        ),
        Option("head", "file or folder of the MTP head (the head in or beside the model)", metavar="FILE"),
        Option(
            "draft-model",
            "smaller model with the same tokenizer, which drafts in the place of an MTP head: folder, GGUF "
            "file or Hugging Face id",
            metavar="MODEL",
        ),
        Option("draft-vocabulary", "draft only among the N most frequent tokens (all)", whole_number),
    ),
    "skipped prompt tokens (not exact)": (
        Option(
            "spec-prefill-model",
            "lets requests skip tokens of their prompts (spec_prefill): a small model of the same vocabulary "
            "that scores the tokens, or self: the model's own first layers (none: refused)",
            metavar="MODEL",
        ),
        Option("spec-prefill-layers", "layers of it that score (half of them)", whole_number),
    ),
    "sampling defaults": (
        Option(
            "generation-config",
            "auto: those of the model's generation_config.json; none: those of the APIs (auto)",
            one_of(*GENERATION_CONFIGS),
            "auto",
            "|".join(GENERATION_CONFIGS),
        ),
        Option("default-temperature", "0 is greedy (generation_config.json's, else 1)", number),
        Option("default-top-p", "nucleus sampling (generation_config.json's, else 1)", number),
        Option("default-top-k", "0: off (generation_config.json's, else 0)", whole_number),
        Option("default-min-p", "0: off (generation_config.json's, else 0)", number),
        Option("default-repetition-penalty", "1: off (generation_config.json's, else 1)", number),
    ),
    "chat": (
        Option(
            "reasoning-parser",
            "format of the reasoning, such as think, harmony or qwen3; none: it stays in the text (auto)",
            default="auto",
            metavar="NAME",
        ),
        Option("max-thinking-tokens", "maximum tokens of reasoning in an answer (no limit)", whole_number),
        Option(
            "reasoning-budget-message",
            "text before the end of reasoning that has used up its budget (none)",
            default="",
        ),
        Option(
            "tool-call-parser",
            "format of tool calls, by its name here, in vLLM or mlx-lm (the chat template's)",
            metavar="NAME",
        ),
        Option("no-tool-grammar", "enforce tools' schemas only in calls that are forced", is_switch=True),
    ),
    "engine": (
        Option(
            "max-rows",
            "maximum sequences decoded at once (16 on a CPU, else 16 to 64 by memory)",
            whole_number,
        ),
        Option("max-context", "maximum tokens of a prompt and its answer (the model's limit)", whole_number),
        Option("memory-budget", "memory for KV caches, such as 8GB (a share of the free memory)", size_bytes),
        Option("tensor-parallel", "run the model on so many ranks on this machine (1)", whole_number),
        Option(
            "rank-timeout",
            "seconds without a sign of life after which a rank counts as lost; 0: no limit (30)",
            seconds,
            30.0,
        ),
        Option(
            "rank-head",
            f"where the MTP head is on several ranks: {', '.join(RANK_HEADS)} (auto: what drafts faster)",
            one_of(*RANK_HEADS),
            "auto",
            "NAME",
        ),
        Option(
            "cache-layout",
            f"how keys and values are kept: {', '.join(CACHE_LAYOUTS)} (auto)",
            one_of(*CACHE_LAYOUTS),
            "auto",
            "NAME",
        ),
        Option("prefill-step-size", "maximum prompt tokens in one step (up to 2048, measured)", whole_number),
        Option(
            "max-stall-ms",
            "longest step that prompts may cause while other requests decode; 0: no limit (200)",
            whole_number,
            200,
        ),
        Option(
            "kv-bits",
            f"bits of keys and values: {_KV_BITS} (the model's own; 16 for quantised models on CPUs)",
            kv_bits,
            metavar="N",
        ),
        Option(
            "step-timeout",
            "least seconds after which a hung step ends the process; 0: never (60)",
            seconds,
            60.0,
        ),
        Option(
            "load-timeout",
            "seconds to load the model, downloads not counted; 0: no limit (1800)",
            seconds,
            1800.0,
        ),
        Option("revision", "commit, tag or branch of a Hugging Face id (main)", metavar="REVISION"),
        Option("dtype", f"type of the weights: {', '.join(DTYPES)} (auto)", one_of(*DTYPES), "auto", "NAME"),
    ),
    "adapters": (
        Option("adapter", "LoRA or DoRA adapter for all requests, fused at load (none)", metavar="DIR"),
        Option(
            "adapters",
            "adapters that requests can name, such as sql=adapters/sql (none)",
            metavar="NAME=DIR",
            is_list=True,
            takes_words=True,
        ),
        Option(
            "adapters-dir",
            "folder from which POST /v1/adapters may load (none: it is refused)",
            metavar="DIR",
        ),
        Option("max-adapters", "maximum adapters loaded at once (16)", whole_number),
        Option("adapter-memory", "memory for --adapters and later ones (1GiB)", size_bytes, 1 << 30),
    ),
    "prefix cache": (
        Option("prefix-cache-bytes", "memory for cached prefixes (a quarter of all caches)", size_bytes),
        Option("prefix-cache-dir", "folder that stores prefixes across restarts (none)", metavar="DIR"),
        Option("prefix-cache-disk-bytes", "maximum size of --prefix-cache-dir (16GiB)", size_bytes),
        Option("no-prefix-cache", "compute every prompt from its first token", is_switch=True),
    ),
    "images": (
        Option("max-image-bytes", "largest image file (20MiB)", size_bytes, 20 << 20),
        Option("max-image-pixels", "maximum pixels of an image (33554432)", whole_number, 32 << 20),
        Option("max-images", "maximum images in a request, frames of videos included (16)", whole_number, 16),
        Option("max-frames", "maximum frames taken from a video that is read as images (8)", whole_number, 8),
        Option(
            "max-video-frames",
            "maximum frames of all videos of a request that the model reads as videos (128)",
            whole_number,
            128,
        ),
        Option("fetch-timeout", "seconds to fetch all images of a request (30)", seconds, 30.0),
        Option("allow-local-media", "folder from which file: URLs may read (none)", metavar="DIR"),
        Option("allow-private-urls", "also fetch images from private addresses", is_switch=True),
        Option("image-cache", "memory for embeddings of images (256MiB)", size_bytes, 256 << 20),
    ),
    "time limits": (
        Option(
            "header-timeout",
            "seconds for the headers of a request, and for a TLS handshake (15)",
            seconds,
            15.0,
        ),
        Option("body-timeout", "seconds for the body; a long body gets more (30)", seconds, 30.0),
        Option("queue-timeout", "seconds until a request has a row; 0: no limit (600)", seconds, 600.0),
        Option("request-timeout", "seconds for a whole request; 0: no limit (0)", seconds, 0.0),
        Option("write-timeout", "seconds until an unread stream is cut off (60)", seconds, 60.0),
    ),
    "requests": (
        Option("max-tokens", "default maximum tokens of an answer (up to --max-context)", whole_number),
        Option("max-queue", "requests that may wait for a row (256)", whole_number, 256),
        Option("max-body", "largest request body (32MiB)", size_bytes, 32 << 20),
        Option("max-live-bytes", "bodies of all requests that run or wait (256MiB)", size_bytes, 256 << 20),
        Option(
            "max-live-tokens",
            "prompt tokens of all requests that run or wait (4194304)",
            whole_number,
            4 << 20,
        ),
        Option("max-connections", "maximum open connections (1024)", whole_number, 1024),
        Option("max-stored-responses", "responses for previous_response_id (1000)", whole_number, 1000),
        Option("keep-alive", "seconds without a token until a stream sends a ping (5)", seconds, 5.0),
        Option("drain", "seconds that a shutdown gives to running requests (30)", seconds, 30.0),
    ),
}
OPTIONS = {option.key: option for group in GROUPS.values() for option in group} | {"model": MODEL}


def add_options(parser: argparse.ArgumentParser) -> None:
    """A flag that is not given is missing in the namespace, so that variable, file and default apply."""
    parser.add_argument("given_models", nargs="*", metavar="MODEL", help=MODEL.help)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file with any of these options, and [models.NAME] tables (OUTRIDER_CONFIG)",
    )
    for title, options in GROUPS.items():
        group = parser.add_argument_group(title)
        for option in options:
            _add(group, option)
    add_foreign_flags(parser)


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    kind: dict[str, Any] = {"metavar": option.metavar or METAVARS.get(option.parse, "TEXT")}
    if option.is_switch:
        kind = {"action": "store_true"}
    elif option.takes_words:
        kind |= {"action": "extend", "nargs": "+"}
    elif option.is_list:
        kind["action"] = "append"
    dest = f"given_{option.key}"
    group.add_argument(option.flag, dest=dest, default=argparse.SUPPRESS, help=option.help, **kind)
