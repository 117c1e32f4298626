"""How a training run reports its progress, and a bar that shows it on a terminal with the time left.

Owns the event and its rendering. Must not know what is being done.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

BAR_WIDTH = 24
REDRAW_EVERY_S = 0.1


@dataclass(frozen=True)
class Progress:
    stage: str  # a phrase for people
    done: float
    total: float
    unit: str
    note: str = ""  # how it stands
    is_news: bool = False  # worth a line of its own where there is no terminal


Listener = Callable[[Progress], None]


def ignore(progress: Progress) -> None:
    """The listener of callers who want silence."""


class TrainingBar:
    """A listener that draws one bar a stage; without a terminal it writes a line a stage and the news."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._clock = clock
        self._stage = ""
        self._began: tuple[float, float] = (0.0, 0.0)  # when, and how much was done already
        self._drawn_s = 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.stage != self._stage:
            self.close()
            self._stage = progress.stage
            self._began = (self._clock(), progress.done)
            if not self._is_terminal:
                self._write(f"{progress.stage}: {_count(progress)}\n")
        if self._is_terminal:
            self._draw(progress)
        elif progress.is_news:
            self._write(f"{progress.stage}: {_count(progress)}, {progress.note}\n")

    def close(self) -> None:
        """Leave the cursor on a fresh line."""
        if self._is_terminal and self._stage:
            self._write("\n")
        self._stage = ""

    def _draw(self, progress: Progress) -> None:
        now = self._clock()
        if progress.done < progress.total and not progress.is_news and now - self._drawn_s < REDRAW_EVERY_S:
            return
        self._drawn_s = now
        share = min(1.0, progress.done / max(1e-9, progress.total))
        bar = "#" * round(BAR_WIDTH * share)
        parts = [_count(progress), self._time_left(progress, now), progress.note]
        shown = ", ".join(part for part in parts if part)
        line = f"{progress.stage} [{bar:-<{BAR_WIDTH}}] {share:4.0%} {shown}"
        self._write(f"\r{line[: shutil.get_terminal_size().columns - 1]}\033[K")  # a second line would stay

    def _time_left(self, progress: Progress, now: float) -> str:
        began_s, done_before = self._began
        done = progress.done - done_before
        if done <= 0 or progress.done >= progress.total:
            return ""
        return f"{duration((now - began_s) * (progress.total - progress.done) / done)} left"

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _count(progress: Progress) -> str:
    return f"{progress.done:,.0f}/{progress.total:,.0f} {progress.unit}"
