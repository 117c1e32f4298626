"""A real server process: `outrider serve` on a free loopback port, and a tiny model with a head for it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
from mlx.utils import tree_flatten

from outrider.models.heads import new_head
from outrider.models.trunk import Trunk
from patience import PATIENCE_S, wait_until
from tiny_models import write_checkpoint

CONTEXT = 8192
PROGRAM = ("-m", "outrider")
ON_CPU = (  # the same program, which computes on the CPU where there is a GPU too
    "-c",
    "import runpy, outrider, mlx.core as mx; mx.set_default_device(mx.cpu); "
    "runpy.run_module('outrider', run_name='__main__')",
)


OF_TESTS = ("OUTRIDER_COSTS", "OUTRIDER_CALIBRATION_SECONDS")  # set in conftest.py


def environment() -> dict[str, str]:
    """The variables of this process without the settings that a user of Outrider has made."""
    kept = (name for name in os.environ if not name.startswith("OUTRIDER_") or name in OF_TESTS)
    return {name: os.environ[name] for name in kept}


def outrider(*args: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """The command, with further environment variables."""
    return subprocess.run(
        [sys.executable, "-m", "outrider", *args],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | variables,
    )


def write_tiny_model(folder: Path, with_head: bool = True, name: str = "llama") -> Path:
    model = write_checkpoint(folder, name, max_position_embeddings=CONTEXT)
    if with_head:
        head = new_head(Trunk(model, CONTEXT))
        weights = {f"mtp.{name}": array for name, array in tree_flatten(head.parameters())}
        (folder / "mtp").mkdir()
        mx.save_safetensors(str(folder / "mtp" / "weights.safetensors"), weights)
    return folder


@dataclass
class ServerProcess:
    process: subprocess.Popen[str]
    url: str
    banner: str
    model: str

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=PATIENCE_S).json()

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=PATIENCE_S, **kwargs)

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S).text
        match = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(match.group(1)) if match else 0.0

    def wait_until_idle(self) -> Any:
        """The status once no request lives; fails if one stays."""
        wait_until(lambda: not self.get("/v1/status")["live_requests"])
        return self.get("/v1/status")


@contextlib.contextmanager
def serving(
    model: Path, *flags: str, program: Sequence[str] = PROGRAM, **variables: str
) -> Iterator[ServerProcess]:
    """`outrider serve` on a free port, until the block is left."""
    process = subprocess.Popen(
        [sys.executable, *program, "serve", str(model), "--port", "0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment() | variables,
    )
    try:
        url, banner = read_until_ready(process)
        yield ServerProcess(process, url, banner, model.name)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_S)


def read_until_ready(process: subprocess.Popen[str]) -> tuple[str, str]:
    """The server's address and its banner."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if line.startswith("Ready: "):
            return line.removeprefix("Ready: ").strip(), "".join(lines)
    raise AssertionError("the server did not start:\n" + "".join(lines))
