"""Durations as people and Ollama's clients write them: 90, 10m, 1h30m, -1."""

from __future__ import annotations

import re

UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h)")
DURATION = re.compile(rf"([+-]?)((?:{PART.pattern})+)")
NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")  # of seconds


def duration_s(text: str) -> float | None:
    """Seconds; None if the text is no duration."""
    text = text.strip()
    if NUMBER.fullmatch(text):
        return float(text)
    match = DURATION.fullmatch(text)
    if match is None:
        return None
    seconds = sum(float(number) * UNITS_S[unit] for number, unit in PART.findall(match.group(2)))
    return -seconds if match.group(1) == "-" else seconds
