"""The options of `outrider serve`: one table, three sources (flags, then OUTRIDER_*, then a TOML file).

Owns names, groups, help and how text becomes values. Must not know what the values do.
"""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.config import DRAFTERS, DTYPES, InvalidConfig
from outrider.request import MAX_DEPTH

PREFIX = "OUTRIDER_"
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
MTP = ("auto", "on", "off")
LEVELS = ("debug", "info", "warning", "error")


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


def seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number of seconds") from None


def size_bytes(text: str) -> int:
    """8GB, 512MiB, 1.5g, or plain bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if match is None or (match.group(2) or "") not in UNITS:
        raise ValueError(f"{text!r} is not a size: write 8GB, 512MiB or a number of bytes")
    return int(float(match.group(1)) * UNITS[match.group(2) or ""])


def depth(text: str) -> int | None:
    """None is "auto": the engine decides."""
    if text == "auto":
        return None
    number = whole_number(text) if text.isdigit() else -1
    if not 0 <= number <= MAX_DEPTH:
        raise ValueError(f"{text!r} is not auto or 0..{MAX_DEPTH}")
    return number


def one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"{text!r} is not one of {', '.join(words)}")
        return text

    return parse


@dataclass(frozen=True)
class Option:
    """One setting. Switches take no value; lists take several, by commas or by repeating the flag."""

    name: str
    help: str
    parse: Callable[[str], Any] = str
    default: Any = None
    metavar: str = "TEXT"
    is_switch: bool = False
    is_list: bool = False

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
    "model", "model folder, GGUF file, Hugging Face id or outrider-see-135m (default: SmolLM2-135M-Instruct)"
)

GROUPS: dict[str, tuple[Option, ...]] = {
    "server": (
        Option("host", "address to bind (127.0.0.1)", default="127.0.0.1", metavar="HOST"),
        Option("port", "port; 0 picks a free one (8000)", whole_number, 8000, "PORT"),
        Option("api-key", "key that clients must send; better given as OUTRIDER_API_KEY", metavar="KEY"),
        Option("allow-public-without-key", "bind a public address without a key", is_switch=True),
        Option(
            "served-model-name", "name of the model for clients (its folder's)", is_list=True, metavar="NAME"
        ),
        Option("cors-origin", "origin that browsers may call from; * is any", is_list=True, metavar="ORIGIN"),
        Option("log-level", "debug, info, warning or error (info)", one_of(*LEVELS), metavar="LEVEL"),
    ),
    "drafts": (
        Option(
            "mtp",
            "use the MTP head: if there is one, always, never (auto)",
            one_of(*MTP),
            "auto",
            "|".join(MTP),
        ),
        Option("draft-depth", f"drafts a step: auto or 0..{MAX_DEPTH} (auto)", depth, metavar="N"),
        Option(
            "drafter",
            f"where drafts come from: {', '.join(DRAFTERS)} (auto)",
            one_of(*DRAFTERS),
            "auto",
            "NAME",
        ),
        Option("head", "MTP head file (the one beside the model)", metavar="FILE"),
        Option("draft-vocabulary", "draft from this many most frequent tokens", whole_number, metavar="N"),
    ),
    "engine": (
        Option("max-rows", "requests decoded at once (16)", whole_number, 16, "N"),
        Option("max-context", "tokens of prompt and answer (the model's)", whole_number, metavar="N"),
        Option(
            "memory-budget", "for caches, such as 8GB (a share of what is free)", size_bytes, metavar="SIZE"
        ),
        Option(
            "prefill-step-size",
            "prompt tokens in one step (128 on a CPU, else 512)",
            whole_number,
            metavar="N",
        ),
        Option("dtype", f"of weights: {', '.join(DTYPES)} (auto)", one_of(*DTYPES), "auto", "NAME"),
    ),
    "prefix cache": (
        Option(
            "prefix-cache-bytes",
            "memory for cached prefixes, such as 2GB (a share of what is free)",
            size_bytes,
            metavar="SIZE",
        ),
        Option("prefix-cache-dir", "folder in which they outlive the server (none)", metavar="DIR"),
        Option("prefix-cache-disk-bytes", "most that folder may hold (16GiB)", size_bytes, None, "SIZE"),
        Option("no-prefix-cache", "compute every prompt from its beginning", is_switch=True),
    ),
    "pictures": (
        Option("max-image-bytes", "largest picture, as sent (20MiB)", size_bytes, 20 << 20, "SIZE"),
        Option("max-image-pixels", "most pixels of a picture (33554432)", whole_number, 32 << 20, "N"),
        Option(
            "max-images", "most pictures in a request, frames of videos included (16)", whole_number, 16, "N"
        ),
        Option("max-frames", "most frames taken from a video (8)", whole_number, 8, "N"),
        Option("fetch-timeout", "seconds for fetching a request's pictures (30)", seconds, 30.0, "S"),
        Option("allow-local-media", "folder that file: URLs may read from (none)", metavar="DIR"),
        Option("allow-private-urls", "fetch pictures from private addresses too", is_switch=True),
        Option("picture-cache", "for embeddings of pictures seen (256MiB)", size_bytes, 256 << 20, "SIZE"),
    ),
    "requests": (
        Option(
            "max-tokens",
            "answer length where a request does not say (the context)",
            whole_number,
            metavar="N",
        ),
        Option("max-queue", "requests that may wait for a row (256)", whole_number, 256, "N"),
        Option("max-body", "largest request body (32MiB)", size_bytes, 32 << 20, "SIZE"),
        Option("max-stored-responses", "for previous_response_id (1000)", whole_number, 1000, "N"),
        Option("keep-alive", "seconds of silence before a stream says it lives (5)", seconds, 5.0, "S"),
        Option("drain", "seconds that a shutdown waits for answers (30)", seconds, 30.0, "S"),
    ),
}
OPTIONS = {option.key: option for group in GROUPS.values() for option in group} | {"model": MODEL}

# Flags of other servers that name one of ours: (target, value given -> our value).
ALIASES: dict[str, tuple[str, Callable[[str], str]]] = {
    "max-num-seqs": ("max_rows", str),
    "max-model-len": ("max_context", str),
    "mtp-num-draft-tokens": ("draft_depth", str),
    "chunked-prefill-tokens": ("prefill_step_size", str),
    "cache-memory-mb": ("memory_budget", lambda text: f"{text}MiB"),
}
SWITCH_ALIASES = {"enable-mtp": ("mtp", "on"), "no-enable-prefix-caching": ("no_prefix_cache", "on")}
# ... and those that ask for what is always so: (takes a value, what to say).
NOTES: dict[str, tuple[bool, str]] = {
    "continuous-batching": (False, "rows are always batched"),
    "use-paged-cache": (False, "caches always grow by pages"),
    "enable-prefix-caching": (False, "prefixes are always cached"),
    "enable-metrics": (False, "/metrics is always there"),
    "mllm": (False, "a model's kind is read from its files"),
    "enable-auto-tool-choice": (False, "tools are always available"),
    "tool-call-parser": (True, "the tool format is read from the chat template"),
    "reasoning-parser": (True, "the reasoning format is read from the chat template"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Absent flags leave no trace in the namespace, so that the other sources can speak."""
    parser.add_argument("given_model", nargs="?", metavar="MODEL", help=MODEL.help)
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file with any of these options (OUTRIDER_CONFIG)"
    )
    for title, options in GROUPS.items():
        group = parser.add_argument_group(title)
        for option in options:
            _add(group, option)
    others = parser.add_argument_group("understood from other servers")
    for name, (target, _) in ALIASES.items():
        others.add_argument(
            f"--{name}", metavar="N", dest=f"alias_{name}", help=f"--{target.replace('_', '-')}"
        )
    for name, (target, value) in SWITCH_ALIASES.items():
        others.add_argument(
            f"--{name}", action="store_true", dest=f"alias_{name}", help=f"--{target} {value}"
        )
    for name, (takes_value, note) in NOTES.items():
        kind: dict[str, Any] = {"metavar": "X"} if takes_value else {"action": "store_true"}
        others.add_argument(f"--{name}", dest=f"note_{name}", help=f"not needed: {note}", **kind)


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    kind: dict[str, Any] = {"metavar": option.metavar}
    if option.is_switch:
        kind = {"action": "store_true"}
    elif option.is_list:
        kind["action"] = "append"
    dest = f"given_{option.key}"
    group.add_argument(option.flag, dest=dest, default=argparse.SUPPRESS, help=option.help, **kind)


def resolve(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Every option's value by its key. Raises InvalidConfig, naming the source of what is wrong."""
    flags = _flags(args)
    file = args.config or environ.get(f"{PREFIX}CONFIG") or None
    from_file = _read_file(Path(file)) if file else {}
    found = {}
    for key, option in OPTIONS.items():
        given = environ.get(option.variable, "")
        if key in flags:
            source, value = flags[key]
        elif given:
            source, value = option.variable, given
        elif key in from_file:
            source, value = f"{file}: {key}", from_file[key]
        else:
            found[key] = () if option.is_list else False if option.is_switch else option.default
            continue
        try:
            found[key] = _value(option, value)
        except ValueError as error:
            raise InvalidConfig(f"{source}: {error}") from None
    return found


def notes(args: argparse.Namespace) -> list[str]:
    """What to say about flags that change nothing here."""
    return [
        f"--{name}: not needed, {note}" for name, (_, note) in NOTES.items() if getattr(args, f"note_{name}")
    ]


def _flags(args: argparse.Namespace) -> dict[str, tuple[str, Any]]:
    """(flag, value) by key; an alias beside the flag it stands for must agree with it."""
    found: dict[str, tuple[str, Any]] = {}
    if args.given_model is not None:
        found["model"] = ("MODEL", args.given_model)
    for key, option in OPTIONS.items():
        if hasattr(args, f"given_{key}") and key != "model":
            found[key] = (option.flag, getattr(args, f"given_{key}"))
    for name, (target, translate) in ALIASES.items():
        if (given := getattr(args, f"alias_{name}")) is not None:
            _agree(found, target, f"--{name}", translate(given))
    for name, (target, value) in SWITCH_ALIASES.items():
        if getattr(args, f"alias_{name}"):
            _agree(found, target, f"--{name}", value)
    return found


def _agree(found: dict[str, tuple[str, Any]], key: str, flag: str, value: str) -> None:
    other, theirs = found.setdefault(key, (flag, value))
    if theirs != value:
        raise InvalidConfig(f"{flag} and {other} {theirs} contradict each other")


def _read_file(file: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(file.read_text())
    except OSError as error:
        raise InvalidConfig(f"{file} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{file} is not TOML: {error}") from None
    found = {name.replace("-", "_"): value for name, value in table.items()}
    unknown = sorted(set(found) - set(OPTIONS))
    if unknown:
        known = ", ".join(sorted(OPTIONS))
        raise InvalidConfig(f"{file}: {unknown[0]!r} is no option. Options: {known}")
    return found


def _value(option: Option, given: Any) -> Any:
    """From a flag's text, a variable's or TOML's own types."""
    if option.is_switch:
        return _switch(given)
    if option.is_list:
        texts = given if isinstance(given, list) else [given]
        return tuple(part.strip() for text in texts for part in str(text).split(",") if part.strip())
    if isinstance(given, (bool, list, dict)):
        raise ValueError(f"{given!r} is not a value for {option.flag}")
    return option.parse(str(given))


def _switch(given: Any) -> bool:
    if isinstance(given, bool):
        return given
    if str(given).lower() in (*TRUE, *FALSE):
        return str(given).lower() in TRUE
    raise ValueError(f"{given!r} is neither true nor false")
