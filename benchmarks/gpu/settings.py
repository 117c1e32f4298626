"""How much is measured, and how results are printed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

CellResult = dict[str, Any]  # of one measurement, for JSON


@dataclass(frozen=True)
class CellSettings:
    rows: Sequence[int]
    depths: Sequence[int]
    accept: Sequence[int]  # percent of drafts that are accepted
    num_prompt: int
    steps: int
    seconds: float  # of decoding in one cell, at most
    rounds: int
    temperature: float
    bandwidth_bytes: int
    is_tiny: bool = False  # checks use tiny models


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def say(line: str) -> None:
    print(line, flush=True)
