"""How much is measured, and how it is told."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Found = dict[str, Any]  # what a cell found, for JSON


@dataclass(frozen=True)
class Settings:
    rows: Sequence[int]
    depths: Sequence[int]
    accept: Sequence[int]  # percent
    num_prompt: int
    steps: int
    seconds: float  # for one cell
    rounds: int
    temperature: float
    bandwidth_bytes: int


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def say(line: str) -> None:
    print(line, flush=True)
