"""A server as a child process of a benchmark: how it is started, when it is ready, how it is stopped."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

LOG_TAIL = 2000  # characters of a log that are shown
START_TIMEOUT_S = 180.0  # seconds until a server must be healthy; chosen by hand
STOP_TIMEOUT_S = 15.0  # seconds between SIGTERM and SIGKILL; chosen by hand


class DidNotStart(Exception):
    """The server cannot be started, or is not healthy in time. The message has the end of its log."""


@dataclass(frozen=True)
class Peer:
    """How a server is started. The word PORT in the command is replaced."""

    name: str
    command: list[str]
    environ: dict[str, str] = field(default_factory=dict)
    is_outrider: bool = False


@dataclass(frozen=True)
class RunningServer:
    peer: Peer
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_TAIL:]


@contextlib.contextmanager
def started(peer: Peer, scratch: Path) -> Iterator[RunningServer]:
    """Runs until the end of the block; its log is in `scratch`."""
    port, log = _free_port(), scratch / f"{peer.name}.log"
    command = [str(port) if word == "PORT" else word for word in peer.command]
    if shutil.which(command[0]) is None:
        raise DidNotStart(f"{peer.name}: no Python at {command[0]}")
    # The benchmark's PYTHONPATH would hide the packages of another Python.
    kept = {name: text for name, text in os.environ.items() if name != "PYTHONPATH" or peer.is_outrider}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=kept | peer.environ)
    try:
        yield RunningServer(peer, port, process, log)
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_healthy(one: RunningServer, timeout_s: float = START_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not _is_healthy(one.port):
        if one.process.poll() is not None or time.monotonic() > deadline:
            raise DidNotStart(f"{one.peer.name} did not start:\n{one.log_tail}")
        time.sleep(0.3)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
