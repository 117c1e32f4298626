"""Starts the ranks of a test: one process each, joined by MLX's ring on loopback."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

PATIENCE_S = 240.0
# outrider comes first: it loads the fast BLAS, which must be loaded before mlx.
RUN = "import outrider, runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def run_ranks(num: int, program: Path, *arguments: object, patience_s: float = PATIENCE_S) -> None:
    """Run `python PROGRAM ARGUMENTS...` as so many ranks. A rank that fails ends the others.

    A program imports what a test can import.
    """
    with tempfile.TemporaryDirectory(prefix="outrider-ranks-") as folder:
        hosts = Path(folder, "hosts.json")
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(num)]))
        paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
        logs = [Path(folder, f"rank-{rank}.txt") for rank in range(num)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RUN, str(program), *map(str, arguments)],
                env={**os.environ, **paths, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
                stderr=logs[rank].open("w"),
            )
            for rank in range(num)
        ]
        try:
            _wait(ranks, patience_s)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        errors = "\n".join(f"rank {number}: {log.read_text()}" for number, log in enumerate(logs))
        assert all(rank.returncode == 0 for rank in ranks), errors


def _wait(ranks: list[subprocess.Popen[bytes]], patience_s: float) -> None:
    """Until all have ended, one has failed, or the time is over."""
    give_up_s = time.monotonic() + patience_s
    while time.monotonic() < give_up_s:
        found = [rank.poll() for rank in ranks]
        if None not in found or any(found):
            return
        time.sleep(0.02)


def free_ports(num: int) -> list[int]:
    """Ports that no one takes until the ranks do: the system gives others those from 32768 on."""
    first = 20_000 + 1_000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports: list[int] = []
    with ExitStack() as stack:
        while len(ports) < num:
            one, port = stack.enter_context(socket.socket()), first + secrets.randbelow(1_000)
            with suppress(OSError):  # it is taken
                one.bind(("127.0.0.1", port))
                ports.append(port)
    return ports
