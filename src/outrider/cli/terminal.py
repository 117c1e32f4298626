"""What a terminal is told: ANSI styles, whether it wants them, and which characters may reach it at all."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TextIO

Styles = tuple[str, ...]  # numbers of ANSI's "select graphic rendition"

BOLD, DIM, ITALIC, UNDERLINE, CYAN = ("1",), ("2",), ("3",), ("4",), ("36",)

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline


def paint(text: str, styles: Styles) -> str:
    return f"\x1b[{';'.join(styles)}m{text}\x1b[0m" if text and styles else text


def printable(text: str) -> str:
    """Without control characters: what a model says must not steer the terminal."""
    return _CONTROL.sub("", text)


def wants_styles(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
