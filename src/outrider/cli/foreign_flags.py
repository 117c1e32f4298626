"""Flags of vLLM and vllm-mlx that `outrider serve` accepts, finds unneeded, or refuses by name.

A flag is accepted only if it means here what it means there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from outrider.config import InvalidConfig


def _mebibytes(text: str) -> str:
    if not text.isdigit():
        raise ValueError(f"{text!r} is not a whole number of MiB")
    return f"{text}MiB"


def _chunk_size(text: str) -> str:
    if text == "0":
        raise ValueError(
            "0 means no chunked prefill in vllm-mlx, and Outrider always prefills in chunks. Use "
            "--prefill-step-size N, with N as large as --max-context, and --max-stall-ms 0 to compute each "
            "prompt in one step"
        )
    return text


# Flags of vLLM and vllm-mlx with the same meaning as one of ours: (our key, their value -> our value, help).
ALIASES: dict[str, tuple[str, Callable[[str], str], str]] = {
    "max-num-seqs": ("max_rows", str, "same as --max-rows"),
    "max-model-len": ("max_context", str, "same as --max-context"),
    "mtp-num-draft-tokens": ("draft_depth", str, "same as --draft-depth"),
    "chunked-prefill-tokens": ("prefill_step_size", _chunk_size, "same as --prefill-step-size; 0 is refused"),
    "cache-memory-mb": ("prefix_cache_bytes", _mebibytes, "same as --prefix-cache-bytes, in MiB"),
}
SWITCH_ALIASES: dict[str, tuple[str, str | bool, str]] = {
    "enable-mtp": ("mtp", "wanted", "same as --mtp wanted"),
    "no-enable-prefix-caching": ("no_prefix_cache", True, "same as --no-prefix-cache"),
    "disable-prefix-cache": ("no_prefix_cache", True, "same as --no-prefix-cache"),
}
# Flags that name a default of Outrider: (takes a value, the line to print).
UNNEEDED: dict[str, tuple[bool, str]] = {
    "continuous-batching": (False, "requests are always batched"),
    "enable-prefix-caching": (False, "prefixes are cached unless --no-prefix-cache is given"),
    "enable-prefix-cache": (False, "prefixes are cached unless --no-prefix-cache is given"),
    "enable-metrics": (False, "/metrics is always served; with API keys, it needs an operator's key"),
    "mllm": (False, "the model's files show whether it reads images"),
    "enable-auto-tool-choice": (False, "tools are always available"),
}
# Flags of features that Outrider does not have: the reason, and the flag to use instead.
REFUSED = {
    "use-paged-cache": (
        "the layout of the KV cache follows from the model and the device. Remove the flag: "
        "--memory-budget SIZE limits the KV caches of running requests, "
        "and --prefix-cache-bytes SIZE limits the cached prefixes"
    ),
}


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("flags of vLLM and vllm-mlx")
    for name, (_, _, text) in ALIASES.items():
        group.add_argument(f"--{name}", metavar="N", dest=f"alias_{name}", help=text)
    for name, (_, _, text) in SWITCH_ALIASES.items():
        group.add_argument(f"--{name}", action="store_true", dest=f"alias_{name}", help=text)
    for name, (takes_value, note) in UNNEEDED.items():
        kind: dict[str, Any] = {"metavar": "X"} if takes_value else {"action": "store_true"}
        group.add_argument(f"--{name}", dest=f"unneeded_{name}", help=f"not needed: {note}", **kind)
    for name, reason in REFUSED.items():
        text = f"refused: {reason.partition('.')[0]}"
        group.add_argument(f"--{name}", action="store_true", dest=f"refused_{name}", help=text)


def translated_flags(args: argparse.Namespace) -> Iterator[tuple[str, str, str | bool]]:
    """(flag, our key, our value) of each accepted flag that was given. Raises InvalidConfig."""
    for name, reason in REFUSED.items():
        if getattr(args, f"refused_{name}"):
            raise InvalidConfig(f"--{name}: {reason}")
    for name, (key, translate, _) in ALIASES.items():
        if (given := getattr(args, f"alias_{name}")) is not None:
            try:
                value = translate(given)
            except ValueError as error:
                raise InvalidConfig(f"--{name}: {error}") from None
            yield f"--{name}", key, value
    for name, (key, switch_value, _) in SWITCH_ALIASES.items():
        if getattr(args, f"alias_{name}"):
            yield f"--{name}", key, switch_value


def notes(args: argparse.Namespace) -> list[str]:
    """A line for each given flag that Outrider does not need."""
    return [
        f"--{name}: not needed, {note}"
        for name, (_, note) in UNNEEDED.items()
        if getattr(args, f"unneeded_{name}")
    ]
