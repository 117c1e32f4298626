"""The worker process of `outrider serve`, beside its supervisor: what it inherits and how it ends."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass

from outrider.config import InvalidConfig

log = logging.getLogger(__name__)

VARIABLE = "OUTRIDER_WORKER"  # set by the supervisor only: descriptors and counts, as JSON
# Time after the drain for the last step, the last bytes and the files of the prefix cache; chosen by hand.
HARD_END_S = 15.0

# Exit statuses.
BAD_SETTING = 2  # as main.py returns it
ENGINE_FAILED = 70
HUNG = 71
SHUTDOWN_TOO_LONG = 72
SUPERVISOR_GONE = 73


@dataclass(frozen=True)
class Worker:
    """The worker's end of what it shares with its supervisor."""

    listener: socket.socket | None  # None: a rank that serves no clients
    supervisor: (
        socket.socket
    )  # gets a byte each second; each process notices by its end that the other is gone
    restarts: Mapping[str, int]  # workers that ended before this one, by reason

    @property
    def num_restarts(self) -> int:
        return sum(self.restarts.values())

    def report_alive(self) -> None:
        with suppress(
            OSError
        ):  # a full buffer: the supervisor is stopped. A broken one: `_follow` notices it
            self.supervisor.send(b".", socket.MSG_DONTWAIT)

    def settle(self) -> None:
        """End with the supervisor, and leave Ctrl-C to it: the terminal sends it to both processes."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        threading.Thread(target=self._follow, name="outrider-supervisor-gone", daemon=True).start()

    def _follow(self) -> None:
        with suppress(OSError):
            while self.supervisor.recv(1):
                pass
        os._exit(SUPERVISOR_GONE)  # at once: a new server must be able to take the port


def environment(
    listener: socket.socket | None, worker_end: socket.socket, restarts: Mapping[str, int]
) -> dict[str, str]:
    """The environment of a new worker."""
    shared = {
        "listener": None if listener is None else [listener.family, listener.fileno()],
        "supervisor": worker_end.fileno(),
        "restarts": restarts,
    }
    return {**os.environ, VARIABLE: json.dumps(shared)}


def inherited(environ: MutableMapping[str, str] = os.environ) -> Worker | None:
    """What the supervisor has passed on to this process; None if this process is no worker."""
    text = environ.pop(VARIABLE, None)  # popped: no child of the worker is a worker
    if text is None:
        return None
    try:
        shared = json.loads(text)
        listener = None
        if shared["listener"] is not None:
            family, descriptor = shared["listener"]
            # The protocol is named as in `listen`: not every system can tell it from the descriptor.
            listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=descriptor)
            listener.set_inheritable(False)
        supervisor = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=shared["supervisor"])
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise InvalidConfig(f"{VARIABLE} is set by Outrider itself: unset it ({error})") from None
    supervisor.set_inheritable(False)
    return Worker(listener, supervisor, shared["restarts"])
