"""The supervisor of `outrider serve`: a small process that holds the listening socket and starts the worker.

A worker that dies is replaced. Its clients' connections end with it; new connections wait in the socket's
backlog until the next worker accepts them. Nothing heavy may be imported here: no MLX, no HTTP server.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from outrider.cli.worker import BAD_SETTING, ENGINE_FAILED, HUNG, SHUTDOWN_TOO_LONG, environment

log = logging.getLogger(__name__)

LOOK_S = 1.0  # seconds between two looks at the worker; chosen by hand
MAX_DELAY_S = 60.0  # between a crash and the next start; chosen by hand
STABLE_S = 60.0  # a worker that was ready for this long does not belong to a crash loop; chosen by hand
EXTRA_S = 5.0  # from the time by which the worker ends itself until it is killed; chosen by hand
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

SIGNAL_NOTES = {
    signal.SIGKILL: "by hand, or by the system because memory ran out",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up",
    signal.SIGBUS: "a crash in native code, or a file that became shorter while it was read",
}
EXIT_NOTES = {
    ENGINE_FAILED: "ended because its engine failed",
    HUNG: "ended itself because it hung",
    SHUTDOWN_TOO_LONG: "ended itself because its shutdown took too long",
}


@dataclass
class RunningWorker:
    process: subprocess.Popen[bytes]
    channel: socket.socket  # the worker sends a byte each second once it is ready
    ready_s: float | None = None  # monotonic
    silent_s: float = 0.0  # since its last byte, as this process saw it
    is_hung: bool = False  # killed here, because it was silent for too long

    def hear(self) -> bool:
        """True if it has sent something since the last call."""
        if not _read(self.channel):
            return False
        self.ready_s = self.ready_s or time.monotonic()
        self.silent_s = 0.0
        return True

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()

    @property
    def end(self) -> str:
        """How it ended, in words."""
        status = self.process.returncode
        if self.is_hung:
            return "hung and was killed"
        if status >= 0:
            return EXIT_NOTES.get(status, f"ended with exit status {status}")
        number = signal.Signals(-status)
        note = f" ({SIGNAL_NOTES[number]})" if number in SIGNAL_NOTES else ""
        return f"was ended by {number.name}{note}"

    @property
    def reason(self) -> str:
        """How it ended, as the label of a metric."""
        status = self.process.returncode
        if self.is_hung or status == HUNG:
            return "hung"
        return "signal" if status < 0 else "engine_failed" if status == ENGINE_FAILED else "exit"

    def exit_status(self, stopped_by: int | None = None) -> int:
        """As a shell reports it. `stopped_by`: the signal for which the supervisor ended the worker."""
        status = self.process.returncode
        if stopped_by is not None and status == -signal.SIGTERM:
            return 0  # it was still loading, and ended when it was asked to
        if stopped_by is not None and status == -signal.SIGKILL:
            return 128 + stopped_by
        return 128 - status if status < 0 else int(status)


@dataclass
class Supervisor:
    command: Sequence[str]  # of the worker
    listener: socket.socket | None  # None: of a rank that serves no clients, and ends when rank 0 stops it
    stop_timeout_s: float  # the worker ends by itself within this time after SIGTERM
    silence_timeout_s: float  # a ready worker that sends nothing for so long is killed; 0: never
    _restarts: Counter[str] = field(default_factory=Counter)
    _num_short_lives: int = 0  # workers in a row that did not live for STABLE_S
    _signals: list[int] = field(default_factory=list)  # received, in order
    _time_left_s: float = float("inf")  # until a worker that was asked to end is killed

    def run(self) -> int:
        """Run until a signal, until the first worker fails before it is ready, or until rank 0 stops a rank.

        Returns the exit status.
        """
        wakeup = self._catch_signals()
        has_served = False
        while not self._signals:
            try:
                worker = self._start_worker()
            except OSError as error:  # such as: no memory for another process
                if not has_served:
                    raise
                self._wait_after(f"could not be started: {error}", None, wakeup)
                continue
            self._wait_for_end(worker, wakeup)
            if self._signals:
                status = worker.exit_status(stopped_by=self._signals[-1])
                if status != 0:
                    log.error("while the server stopped, the worker %s", worker.end)
                return status
            if self.listener is None and worker.process.returncode == 0:
                return 0
            has_served = has_served or worker.ready_s is not None
            if not has_served:  # a start that never worked is not repeated
                if worker.process.returncode != BAD_SETTING:  # then the worker has said what to change
                    log.error("the server could not start: the worker %s", worker.end)
                return worker.exit_status() or 1
            self._restarts[worker.reason] += 1
            self._wait_after(worker.end, worker.ready_s, wakeup)
        return 0

    def _wait_after(self, end: str, ready_s: float | None, wakeup: socket.socket) -> None:
        delay_s = self._next_delay_s(ready_s)
        log.error("the worker %s; a new one starts %s", end, f"in {delay_s:g} s" if delay_s else "now")
        end_s = time.monotonic() + delay_s
        while not self._signals and (left_s := end_s - time.monotonic()) > 0:
            _wait((wakeup,), left_s)

    def _next_delay_s(self, ready_s: float | None) -> float:
        """0, 1, 2, 4, ... 60: at once after a long life, ever later in a crash loop."""
        if ready_s is not None and time.monotonic() - ready_s >= STABLE_S:
            self._num_short_lives = 0
        self._num_short_lives += 1
        if self._num_short_lives == 1:
            return 0.0
        return min(MAX_DELAY_S, 2.0 ** min(self._num_short_lives - 2, 10))

    def _start_worker(self) -> RunningWorker:
        channel, worker_end = socket.socketpair()
        shared = [worker_end] if self.listener is None else [self.listener, worker_end]
        # SIGINT stays blocked until the worker ignores it: a Ctrl-C in the terminal reaches both processes.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process = subprocess.Popen(
                [sys.executable, *self.command],
                env=environment(self.listener, worker_end, self._restarts),
                pass_fds=[one.fileno() for one in shared],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            worker_end.close()
        channel.setblocking(False)
        return RunningWorker(process, channel)

    # -- waiting -----------------------------------------------------------------------------------------

    def _catch_signals(self) -> socket.socket:
        """From now on signals are noted in `_signals`, and each makes the returned socket readable."""
        wakeup, wakeup_end = socket.socketpair()
        wakeup.setblocking(False)
        wakeup_end.setblocking(False)
        signal.set_wakeup_fd(wakeup_end.detach(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup
                signal.signal(number, lambda number, _: self._signals.append(number))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        return wakeup

    def _wait_for_end(self, worker: RunningWorker, wakeup: socket.socket) -> None:
        num_seen, looked_s = 0, time.monotonic()
        with worker.channel:
            while not _reap(worker.process):
                for number in self._signals[num_seen:]:
                    num_seen += 1
                    self._on_signal(worker, number, is_first=num_seen == 1)
                _wait((wakeup, worker.channel), LOOK_S)
                now_s = time.monotonic()
                # Two periods at most: this process itself may have been stopped, or have got no CPU.
                self._look(worker, min(now_s - looked_s, 2 * LOOK_S))
                looked_s = now_s
            worker.hear()  # it may have been ready just before it ended

    def _on_signal(self, worker: RunningWorker, number: int, is_first: bool) -> None:
        if is_first and number != signal.SIGHUP:
            self._time_left_s = self.stop_timeout_s + EXTRA_S
            with suppress(ProcessLookupError):
                worker.process.terminate()
        else:
            log.warning("%s: the server ends at once", signal.Signals(number).name)
            worker.kill()

    def _look(self, worker: RunningWorker, passed_s: float) -> None:
        if not worker.hear() and worker.ready_s is not None:
            worker.silent_s += passed_s
        self._time_left_s -= passed_s if self._signals else 0.0
        if self._time_left_s <= 0:
            log.error("the worker did not end in time and is killed")
            self._time_left_s = float("inf")
            worker.kill()
        elif 0 < self.silence_timeout_s < worker.silent_s and not self._signals and not worker.is_hung:
            log.error("the worker has shown no sign of life for %.0f s and is killed", worker.silent_s)
            worker.is_hung = True
            worker.kill()


def _wait(sockets: tuple[socket.socket, ...], timeout_s: float) -> None:
    """Until one of them has something to read, or has ended."""
    select.select(sockets, (), (), timeout_s)
    _read(sockets[0])


def _read(one: socket.socket) -> bytes:
    try:
        return one.recv(4096)
    except OSError:
        return b""


def _reap(process: subprocess.Popen[bytes]) -> bool:
    """True if the process has ended. Collects other children too: as process 1 of a container it has some."""
    while process.returncode is None:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            pid, status = process.pid, 0
        if pid == 0:
            return False
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)
    return True
