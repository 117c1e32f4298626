"""Progress reports of long work, and a terminal bar that shows them.

Must not know which work is being done.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

from outrider.terminal import console_for

BAR_WIDTH = 24  # characters; chosen by hand
REDRAW_EVERY_S = 0.1  # seconds; chosen by hand: smooth, and without a load that would disturb timings
SPEED_WINDOW_S = 600.0  # seconds of reports that the time left is estimated from; one report may take minutes


@dataclass(frozen=True)
class Progress:
    stage: str  # a phrase for people, such as "Downloading the default model"
    done: float
    total: float
    unit: str = "bytes"  # bytes are shown as MB
    note: str = ""  # the current state, such as the loss
    is_news: bool = False  # worth a line of its own if the output is not a terminal

    @property
    def count(self) -> str:
        if self.unit == "bytes":
            return f"{self.done / 1e6:.0f}/{self.total / 1e6:.0f} MB"
        return f"{self.done:,.0f}/{self.total:,.0f} {self.unit}"


Listener = Callable[[Progress], None]


def ignore(progress: Progress) -> None:
    """A listener that shows nothing."""


class ProgressBar:
    """A listener that shows one bar for each stage.

    If the stream is not a terminal, it writes one line for each stage and one for each report that is news.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console_for(stream or sys.stderr)
        self._clock = clock
        self._stage = ""
        self._bar: RichProgress | None = None
        self._drawn_s = 0.0

    def __call__(self, progress: Progress) -> None:
        is_new = progress.stage != self._stage
        if is_new:
            self.close()
            self._stage = progress.stage
        if self._console.is_interactive:
            self._draw(progress, is_new)
        elif is_new or progress.is_news:
            note = f", {progress.note}" if progress.is_news and progress.note else ""
            self._console.print(f"{progress.stage}: {progress.count}{note}")

    def close(self) -> None:
        """Leaves the bar of the last stage as it is, with the cursor on the next line."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = None
        self._stage = ""

    def _draw(self, progress: Progress, is_new: bool) -> None:
        fields: dict[str, Any] = {"count": progress.count, "note": progress.note}
        if self._bar is None:
            self._bar = self._new_bar()
            self._bar.start()
            self._bar.add_task(progress.stage, completed=int(progress.done), total=progress.total, **fields)
        else:
            self._bar.update(TaskID(0), completed=progress.done, total=progress.total, **fields)
        now_s = self._clock()
        is_due = is_new or progress.is_news or progress.done >= progress.total
        if is_due or now_s - self._drawn_s >= REDRAW_EVERY_S:
            self._drawn_s = now_s
            self._bar.refresh()

    def _new_bar(self) -> RichProgress:
        """Without rich's refresh thread, which would compete with a model that is being timed."""
        return RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(BAR_WIDTH),
            TaskProgressColumn(),
            TextColumn("{task.fields[count]}", markup=False),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
            console=self._console,
            expand=True,  # the note gets the rest of the line and is cut there
            auto_refresh=False,
            speed_estimate_period=SPEED_WINDOW_S,
            redirect_stdout=False,
            redirect_stderr=False,
            get_time=self._clock,
        )
