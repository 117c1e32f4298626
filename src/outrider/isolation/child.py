"""The child process's side: limits itself, then does one job after the other until the connection ends.

Linux enforces all limits. macOS has no limit of the address space; processor time, core files and file sizes
are limited there too.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from outrider.isolation.messages import Buffer, ConnectionEnded, Message, receive, send

# A job's reply: its fields, and the parts of its data.
Reply = tuple[dict[str, Any], Sequence[Buffer]]
Handler = Callable[[Message], Reply]

MAX_REQUEST_BYTES = 1 << 40  # the server has checked the size of what it sends


def serve(new_handler: Callable[[Message], Handler]) -> None:
    """`new_handler` gets the set-up message of the server; its handler gets each job."""
    limits: dict[str, Any] = json.loads(sys.argv[1])
    _ignore_signals()
    _limit_process(limits["file_bytes"])
    connection = socket.socket(fileno=0)
    with contextlib.suppress(ConnectionEnded, BrokenPipeError):  # the server has closed it or is gone
        try:
            handler = new_handler(receive(connection, MAX_REQUEST_BYTES))
        except Exception as error:
            send(connection, {"failed": _described(error)})
            return
        _limit_memory(limits["memory_bytes"])
        send(connection, {})
        while True:
            job = receive(connection, MAX_REQUEST_BYTES)
            _limit_cpu_time(limits["cpu_s"])
            send(connection, *_reply(handler, job))


def _reply(handler: Handler, job: Message) -> Reply:
    try:
        return handler(job)
    except MemoryError:
        return {"failed": "it needed too much memory"}, ()
    except BaseException as error:  # a panic of Rust code is a BaseException
        return {"failed": "it raised an exception", "details": _described(error)}, ()


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


def _ignore_signals() -> None:
    """Only the server ends this process: Ctrl-C and the stop of a service are for the server."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _limit_process(file_bytes: int) -> None:
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, this process is killed and not the server
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, file_bytes)


def _limit_memory(num_bytes: int) -> None:
    """Limit the address space to what the process has now and `num_bytes` more."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        _limit(resource.RLIMIT_AS, int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + num_bytes)


def _limit_cpu_time(seconds: int) -> None:
    """At this limit the system sends SIGXCPU, which ends the process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds, is_final=False)


def _limit(what: int, value: int, is_final: bool = True) -> None:
    """A limit that the operator has set for the server stays if it is lower."""
    _, hard = resource.getrlimit(what)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(what, (value, value if is_final else hard))
