"""The watchdog: ends the server process if its engine or event loop hangs, or if a start or a shutdown takes
too long.

The supervisor, or the operator's service manager, then starts a new process. A thread that hangs cannot be
stopped from outside: only its process can be ended.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from outrider.cli.worker import HUNG, SHUTDOWN_TOO_LONG
from outrider.engine.heartbeat import Heartbeat

log = logging.getLogger(__name__)

LOOK_S = 1.0  # seconds between two looks; chosen by hand
REPORT_S = 5.0  # for the last lines of the log: writing them may hang too; chosen by hand


class WatchedEngine(Protocol):
    @property
    def failure(self) -> str | None: ...

    @property
    def heartbeat(self) -> Heartbeat: ...


class Watchdog:
    def __init__(
        self,
        engines: Callable[[], Sequence[WatchedEngine]],
        step_timeout_s: float,
        restarts: Mapping[str, int],
        end_process: Callable[[int], None] = os._exit,
    ) -> None:
        """`engines`: of the models that are loaded now."""
        self.event_loop = Heartbeat()
        self.restarts = restarts
        self.on_engine_failure: Callable[[], None] = lambda: None  # called once, on the watchdog's thread
        # Called with the reason before the end of a process that hangs, and may end the process itself.
        self.on_hang: Callable[[str], None] = lambda reason: None
        self.lost_rank: str | None = None  # why the model's ranks cannot go on
        self._engines = engines
        self._step_timeout_s = step_timeout_s
        self._end_process = end_process
        # By heartbeat: its activity at the last look, and the seconds in that activity.
        self._seen: dict[Heartbeat, tuple[tuple[str, float], float]] = {}
        self._has_failed = False
        self._time_left_s: float | None = None  # until the hard end of a shutdown

    # -- for any thread ----------------------------------------------------------------------------------

    def fault(self) -> str | None:
        """Why the engine does not work; None if it does."""
        if self.lost_rank is not None:
            return self.lost_rank
        for engine in self._engines():
            if engine.failure is not None:
                return "the engine has failed"
            heartbeat = engine.heartbeat
            if heartbeat.age_s > heartbeat.limit_s(self._step_timeout_s):
                return f"the engine hangs: {heartbeat.activity} for {heartbeat.age_s:.0f} s"
        return None

    @property
    def heartbeat_age_s(self) -> float:
        return max((engine.heartbeat.age_s for engine in self._engines()), default=0.0)

    def end_within(self, seconds: float) -> None:
        """The process has to end within this time. Sets one field: signal handlers may call it."""
        self._time_left_s = seconds

    def start(self, on_look: Callable[[], None]) -> None:
        """Look every second, and call `on_look` each time."""
        threading.Thread(target=self._run, args=(on_look,), name="outrider-watchdog", daemon=True).start()

    # -- on the watchdog's thread ------------------------------------------------------------------------

    def _run(self, on_look: Callable[[], None]) -> None:
        looked_s = time.monotonic()
        while True:
            on_look()
            time.sleep(LOOK_S)
            now_s = time.monotonic()
            # Two periods at most: the process may have been stopped for a while, or have got no CPU.
            self.look(min(now_s - looked_s, 2 * LOOK_S))
            looked_s = now_s

    def look(self, passed_s: float) -> None:
        engines = self._engines()
        if not self._has_failed and any(engine.failure is not None for engine in engines):
            self._has_failed = True
            self.on_engine_failure()
        heartbeats = [("engine", engine.heartbeat) for engine in engines]
        seen, self._seen = self._seen, {}
        for thread, heartbeat in (*heartbeats, ("event loop", self.event_loop)):
            current = heartbeat.current
            before, stuck_s = seen.get(heartbeat, (None, 0.0))
            stuck_s = stuck_s + passed_s if current is before else 0.0
            self._seen[heartbeat] = (current, stuck_s)
            if stuck_s > heartbeat.limit_s(self._step_timeout_s):
                text = f"the {thread} hangs: {current[0]} for {stuck_s:.0f} s"
                _report_in_time(f"{text} (--step-timeout). The process ends. Stacks of its threads:")
                self.on_hang(text)
                self._end_process(HUNG)
        if self._time_left_s is not None:
            self._time_left_s -= passed_s
            if self._time_left_s <= 0:
                _report_in_time("the shutdown takes too long. Stacks of the threads:")
                self._end_process(SHUTDOWN_TOO_LONG)


def watch_loading(
    is_ready: threading.Event, timeout_s: float, end_process: Callable[[int], None] = os._exit
) -> None:
    """End the process if the event is not set in time. 0: no limit."""
    if timeout_s > 0:
        args = (is_ready, timeout_s, end_process)
        threading.Thread(target=_watch_loading, args=args, name="outrider-load-watch", daemon=True).start()


_newest_watched: list[threading.Event] = []  # of the load for which faulthandler is set up


def _watch_loading(is_ready: threading.Event, timeout_s: float, end_process: Callable[[int], None]) -> None:
    _newest_watched[:] = [is_ready]
    # Native code that opens the files may keep Python's lock. Then no thread here goes on, and faulthandler,
    # which needs no lock, writes the stacks and ends the process with status 1.
    faulthandler.dump_traceback_later(timeout_s + 2 * REPORT_S, exit=True)
    if not is_ready.wait(timeout_s):
        text = f"the model was not loaded within {timeout_s:g} s (--load-timeout)"
        _report_in_time(f"{text}. The process ends. Stacks of its threads:")
        end_process(HUNG)
    if _newest_watched == [is_ready]:  # else the next load has begun already
        faulthandler.cancel_dump_traceback_later()


def _report_in_time(text: str) -> None:
    """Reports on a thread of its own: writing to a log that nobody reads can hang."""
    report = threading.Thread(target=_report, args=(text,), daemon=True)
    report.start()
    report.join(REPORT_S)


def _report(text: str) -> None:
    log.critical(text)
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback(sys.__stderr__)
