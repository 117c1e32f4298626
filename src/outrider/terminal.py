"""Output for terminals and for other streams: consoles, tables, text without control characters."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.table import Column, Table

ANY_WIDTH = 100_000  # characters: wider than any line that is written to a file or a pipe

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline


def printable(text: str) -> str:
    """Removes control characters, so that text from a model or a server cannot steer the terminal."""
    return _CONTROL.sub("", text)


def wants_styles(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def console_for(stream: TextIO) -> Console:
    """A stream that is not a terminal gets plain text, and its lines are never wrapped."""
    is_terminal = stream.isatty()
    return Console(
        file=stream,
        force_terminal=is_terminal,
        width=None if is_terminal else ANY_WIDTH,
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=not is_terminal,
    )


def new_table(*titles: str) -> Table:
    """Columns two spaces apart, without lines between them. A cell is folded, not cut, if it is too wide."""
    columns = [Column(title, overflow="fold") for title in titles]
    return Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(titles))
