"""The values of options as texts: one parser for each kind of value. A parser raises ValueError."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from outrider.config import KV_BITS
from outrider.pool.durations import duration_s
from outrider.request import MAX_DEPTH

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


def number(text: str, kind: str = "a number") -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not {kind}")
    return value


def seconds(text: str) -> float:
    return number(text, "a number of seconds")


def duration(text: str) -> float:
    """10m, 1h30m, or plain seconds."""
    found = duration_s(text)
    if found is None or not 0 <= found < math.inf:
        raise ValueError(f"{text!r} is not a duration: write 10m, 1h30m or a number of seconds")
    return found


def size_bytes(text: str) -> int:
    """8GB, 512MiB, 1.5g, or plain bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if match is None or (match.group(2) or "") not in UNITS:
        raise ValueError(f"{text!r} is not a size: write 8GB, 512MiB or a number of bytes")
    return int(float(match.group(1)) * UNITS[match.group(2) or ""])


def depth(text: str) -> int | None:
    """None is "auto": the engine chooses the depth of each step."""
    if text == "auto":
        return None
    number = whole_number(text) if text.isdigit() else -1
    if not 0 <= number <= MAX_DEPTH:
        raise ValueError(f"{text!r} is not auto or 0..{MAX_DEPTH}")
    return number


def kv_bits(text: str) -> int:
    if text not in map(str, KV_BITS):
        raise ValueError(f"{text!r} is not one of {', '.join(map(str, KV_BITS))}")
    return int(text)


def one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"{text!r} is not one of {', '.join(words)}")
        return text

    return parse
