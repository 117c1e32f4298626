"""The server's side of a child process: starts the process, sends it jobs, and starts it again if it dies.

The process runs `python -m MODULE`; the module calls `child.serve`. If a job crashes the process, or exceeds
a limit, only that job fails.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from outrider.isolation.messages import Buffer, ConnectionEnded, Message, receive, send

log = logging.getLogger(__name__)

START_S = 120.0  # seconds for the start of a process and its set-up, on a busy machine; chosen by hand
END_S = 5.0  # seconds from the end of the connection to the end of the process; chosen by hand
MIB = 1 << 20
# All that a child gets of the server's environment: no keys and no tokens.
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "VIRTUAL_ENV")
OWN_VARIABLES = {
    "OUTRIDER_BLAS": "off",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "MALLOC_ARENA_MAX": "2",  # each arena takes 64 MiB of address space
}


@dataclass(frozen=True)
class WorkerLimits:
    """Limits of a child process. Not every system enforces all of them: see child.py."""

    memory_bytes: int  # address space beyond what the set-up takes
    cpu_s: int  # processor time of one job
    answer_s: float  # time of one job by the clock, also if it only waits
    file_bytes: int = 0  # size of a file that the process may write
    max_reply_bytes: int = 0  # data of a reply


class JobFailed(Exception):
    """The process died or exceeded a limit while it did the job. The message says which.

    Clients see the message: it has no text of an exception.
    """


class JobTimedOut(JobFailed):
    """The job took more than its processor time, or than its time by the clock."""


class WorkerUnavailable(RuntimeError):
    """No process could be started, or it was killed from outside: the job may succeed another time.

    Limits of this project never end a process by SIGKILL that `_Process` has not sent itself. So another
    SIGKILL is the system's (no memory left) or the operator's.
    """


class IsolatedWorker:
    """One child process, which starts with the first job. Thread-safe: jobs take turns."""

    def __init__(
        self, module: str, limits: WorkerLimits, set_up: Callable[[], Message] = lambda: Message({})
    ) -> None:
        """`set_up`: the first message for each new process."""
        self._module = module
        self._limits = limits
        self._set_up = set_up
        self._lock = threading.Lock()  # held during a job
        self._process: _Process | None = None
        self._is_closed = False

    def call(self, fields: dict[str, Any], data: Buffer = b"") -> Message:
        """The process's reply to one job. Raises JobFailed, WorkerUnavailable.

        If a process dies that has done other jobs before, a new process gets the job once more: the first
        one may have died of what those jobs left behind, or of a signal.
        """
        with self._lock:
            if self._process is not None:
                try:
                    return self._ask(fields, data)
                except JobTimedOut:
                    raise
                except (JobFailed, WorkerUnavailable):
                    pass
            return self._ask(fields, data)

    def close(self) -> None:
        """End the process. A job that runs fails."""
        self._is_closed = True
        self._end(self._process)

    @property
    def process_id(self) -> int | None:
        process = self._process
        return None if process is None else process.popen.pid

    def _ask(self, fields: dict[str, Any], data: Buffer) -> Message:
        process = self._process = self._process or self._start()
        try:
            reply = process.ask(fields, data, self._limits)
        except BaseException:
            self._process = None
            self._end(process)
            raise
        return reply

    def _start(self) -> _Process:
        if self._is_closed:
            raise WorkerUnavailable("the server is shutting down")
        process = _Process(self._module, self._limits)
        self._finalizer = weakref.finalize(self, process.end)  # also if this worker is never closed
        try:
            process.set_up(self._set_up())
        except BaseException:
            self._end(process)
            raise
        if self._is_closed:  # closed meanwhile
            self._end(process)
        return process

    def _end(self, process: _Process | None) -> None:
        if process is not None:
            self._finalizer.detach()
            process.end()


class _Process:
    def __init__(self, module: str, limits: WorkerLimits) -> None:
        self._connection, theirs = socket.socketpair()
        variables = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        variables |= {
            **OWN_VARIABLES,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        try:
            self.popen = subprocess.Popen(
                # -P: modules come from where the server's come from, and not from the current folder.
                [sys.executable, "-P", "-m", module, json.dumps(asdict(limits))],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,  # native decoders write there as they like
                stderr=subprocess.DEVNULL,
                env=variables,
            )
        except OSError as error:
            self._connection.close()
            raise WorkerUnavailable(f"a child process could not be started: {error}") from error
        finally:
            theirs.close()

    def set_up(self, message: Message) -> None:
        deadline_s = time.monotonic() + START_S
        try:
            self._connection.settimeout(START_S)
            send(self._connection, message.fields, [message.data])
            reply = receive(self._connection, 0, deadline_s)
        except (OSError, ValueError) as error:
            raise WorkerUnavailable(f"a child process could not be set up: {error}") from error
        if "failed" in reply.fields:
            raise WorkerUnavailable(f"a child process could not be set up: {reply.fields['failed']}")

    def ask(self, fields: dict[str, Any], data: Buffer, limits: WorkerLimits) -> Message:
        deadline_s = time.monotonic() + limits.answer_s
        try:
            self._connection.settimeout(limits.answer_s)
            send(self._connection, fields, [data])
            reply = receive(self._connection, limits.max_reply_bytes, deadline_s)
        except TimeoutError:
            raise JobTimedOut(f"it took more than {limits.answer_s:g} s") from None
        except (ConnectionEnded, OSError):
            raise self._cause_of_death(limits) from None
        except ValueError as error:  # a process with damaged memory may send anything
            log.warning("the result of a child process could not be read: %s", error)
            raise JobFailed("its result could not be read") from None
        if "failed" in reply.fields:
            log.info("a job of a child process failed: %s", reply.fields)
            raise JobFailed(str(reply.fields["failed"])[:200])
        return reply

    def end(self) -> None:
        """Kill the process and wait for it. A second call has no effect."""
        self.popen.kill()
        self.popen.wait()
        self._connection.close()

    def _cause_of_death(self, limits: WorkerLimits) -> JobFailed | WorkerUnavailable:
        try:
            code = self.popen.wait(END_S)  # the connection may end a moment before the process
        except subprocess.TimeoutExpired:
            return JobFailed("its process closed the connection")
        if code == -signal.SIGXCPU:
            return JobTimedOut(f"it took more than {limits.cpu_s} s of processor time")
        if code == -signal.SIGKILL:
            return WorkerUnavailable("a child process was killed, perhaps because memory ran out")
        if code == -signal.SIGABRT:
            return JobFailed(f"it needed more than {limits.memory_bytes // MIB} MiB of memory, or crashed")
        return JobFailed("it crashed the process that reads it")
