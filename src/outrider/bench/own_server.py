"""Our own server as a child process, so that the client that measures does not share its interpreter."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.bench.errors import BenchFailed

READY = "Ready: "
END_S = 10.0


@dataclass(frozen=True)
class OwnServer:
    url: str
    pid: int


@contextlib.contextmanager
def own_server(model: str | None, flags: Sequence[str]) -> Iterator[OwnServer]:
    """`outrider serve` on a free port until the block is left. It tells the terminal itself why it fails."""
    command = [sys.executable, "-m", "outrider", "serve", *([model] if model else []), "--port", "0"]
    usual = ("--host", "127.0.0.1", "--log-level", "warning", "--drain", "1")
    process = subprocess.Popen(
        [*command, *usual, *flags], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(READY):
                break
        else:
            raise BenchFailed(f"the server did not start (exit status {process.wait()})")
        yield OwnServer(line.removeprefix(READY).strip(), process.pid)
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
