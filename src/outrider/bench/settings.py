"""The settings of a benchmark, frozen and validated, and the presets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.bench.workloads import WORKLOADS, Workload, arrivals_workload, long_workload, uneven_workload
from outrider.config import InvalidConfig
from outrider.request import MAX_DEPTH, DraftDepth

# Workloads whose prompts have a length that can be chosen.
LONG_PROMPTS = {"long": long_workload, "arrivals": arrivals_workload, "uneven": uneven_workload}

MAX_STREAMS = 1024  # connections at once; chosen by hand


@dataclass(frozen=True)
class BenchSettings:
    """Each workload runs with each number of streams at each temperature: `rounds` rounds of each variant."""

    workloads: tuple[str, ...] = ("chat", "code", "json")
    streams: tuple[int, ...] = (1, 4, 8)
    temperatures: tuple[float, ...] = (0.0,)
    rounds: int = 3
    repeats: int = 1  # runs of each round; the fastest one of each variant counts
    requests: int = 2  # per stream and round; with only one, streams are idle for most of a round
    max_tokens: int = 64  # of an answer, which the model may end earlier
    prompt_tokens: int | None = None  # about, of the workloads with long prompts; None: as usual
    depths: tuple[DraftDepth, ...] = ("auto",)  # one variant for each, beside the variant without drafts
    seed: int = 1
    timeout_s: float = 300.0  # without a byte from a server

    def __post_init__(self) -> None:
        _unique("--workloads", self.workloads)
        for name in self.workloads:
            if name not in WORKLOADS:
                raise InvalidConfig(f"--workloads: there is no {name!r}. Workloads: {', '.join(WORKLOADS)}")
        _unique("--streams", self.streams)
        for streams in self.streams:
            _within("--streams", streams, 1, MAX_STREAMS)
        _unique("--temperatures", self.temperatures)
        for temperature in self.temperatures:
            _within("--temperatures", temperature, 0, 2)
        _within("--rounds", self.rounds, 1, 10_000)
        _within("--repeats", self.repeats, 1, 100)
        _within("--requests", self.requests, 1, 10_000)
        _within("--max-tokens", self.max_tokens, 2, 1_000_000)
        if self.prompt_tokens is not None:
            _within("--prompt-tokens", self.prompt_tokens, 100, 1_000_000)
            if not LONG_PROMPTS.keys() & set(self.workloads):
                raise InvalidConfig(
                    f"--prompt-tokens is for the workloads {', '.join(LONG_PROMPTS)}: add --workloads long"
                )
        _unique("--depths", self.depths)
        for depth in self.depths:
            if depth != "auto" and not 1 <= depth <= MAX_DEPTH:
                raise InvalidConfig(
                    f"--depths: {depth} is not auto or 1..{MAX_DEPTH} (depth 0 is always measured)"
                )
        _within("--timeout", self.timeout_s, 0.001, 86_400)

    def workload(self, name: str) -> Workload:
        if name in LONG_PROMPTS and self.prompt_tokens is not None:
            return LONG_PROMPTS[name](self.prompt_tokens)
        return WORKLOADS[name]

    def requests_per_round(self, streams: int) -> int:
        return self.requests * streams


PRESETS: dict[str, dict[str, Any]] = {
    "quick": {
        "workloads": ("chat", "json"),
        "streams": (1, 4),
        "rounds": 2,
        "requests": 1,
        "max_tokens": 16,
    },
    "full": {
        "workloads": tuple(WORKLOADS),
        "streams": (1, 2, 4, 8, 16),
        "temperatures": (0.0, 0.8),
        "rounds": 5,
        "max_tokens": 128,
    },
}


def _within(flag: str, value: float, lowest: float, highest: float) -> None:
    if not lowest <= value <= highest:
        raise InvalidConfig(f"{flag}: {value:g} is not from {lowest:g} to {highest:g}")


def _unique(flag: str, values: Sequence[object]) -> None:
    if not values:
        raise InvalidConfig(f"{flag} needs at least one value")
    if len(set(values)) < len(values):
        raise InvalidConfig(f"{flag} has the same value twice: {' '.join(map(str, values))}")
