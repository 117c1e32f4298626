"""`outrider serve` as a child process, so that server and benchmark do not share a Python interpreter."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.bench.errors import BenchFailed

READY = "Ready: "  # begins the line with the server's URL
STOP_TIMEOUT_S = 10.0  # seconds between SIGTERM and SIGKILL; chosen by hand


@dataclass(frozen=True)
class ChildServer:
    url: str
    pid: int


@contextlib.contextmanager
def child_server(model: str | None, flags: Sequence[str]) -> Iterator[ChildServer]:
    """Runs on a free port until the end of the block. The server prints the reason itself if it fails."""
    command = [sys.executable, "-m", "outrider", "serve", *([model] if model else []), "--port", "0"]
    # Without a supervisor, the process is the server, whose memory is measured.
    fixed = ("--host", "127.0.0.1", "--log-level", "warning", "--drain", "1", "--no-supervisor")
    process = subprocess.Popen(
        [*command, *fixed, *flags], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(READY):
                break
        else:
            raise BenchFailed(f"the server did not start (exit status {process.wait()})")
        yield ChildServer(line.removeprefix(READY).strip(), process.pid)
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
