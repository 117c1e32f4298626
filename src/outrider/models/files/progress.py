"""How long-running work on models reports its progress, and a bar that shows it on a terminal.

Owns the event and its rendering. Must not know what is being downloaded or converted.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

BAR_WIDTH = 30
REDRAW_EVERY_S = 0.1


@dataclass(frozen=True)
class Progress:
    """One report: `stage` is a phrase for people ("downloading SmolLM2"), the counts are bytes."""

    stage: str
    done_bytes: int
    total_bytes: int


Listener = Callable[[Progress], None]


def ignore(progress: Progress) -> None:
    """The listener of callers who want silence."""


class TerminalBar:
    """A listener that draws one bar per stage; without a terminal it writes one line per stage."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._stage = ""
        self._drawn_at_s = 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.stage != self._stage:
            self._begin(progress)
        if self._is_terminal and self._is_due(progress):
            self._draw(progress)

    def close(self) -> None:
        """Leave the cursor on a fresh line."""
        if self._is_terminal and self._stage:
            self._stream.write("\n")
            self._stream.flush()
        self._stage = ""

    def _begin(self, progress: Progress) -> None:
        self.close()
        self._stage = progress.stage
        if not self._is_terminal:
            self._stream.write(f"{progress.stage} ({progress.total_bytes / 1e6:.0f} MB)\n")
            self._stream.flush()

    def _is_due(self, progress: Progress) -> bool:
        now_s = time.monotonic()
        due = progress.done_bytes >= progress.total_bytes or now_s - self._drawn_at_s >= REDRAW_EVERY_S
        if due:
            self._drawn_at_s = now_s
        return due

    def _draw(self, progress: Progress) -> None:
        share = min(1.0, progress.done_bytes / max(1, progress.total_bytes))
        bar = "#" * round(BAR_WIDTH * share)
        counts = f"{progress.done_bytes / 1e6:.0f}/{progress.total_bytes / 1e6:.0f} MB"
        self._stream.write(f"\r{progress.stage} [{bar:-<{BAR_WIDTH}}] {share:4.0%} {counts}")
        self._stream.flush()
