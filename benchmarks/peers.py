"""Compares Outrider with other servers: starts each with the same BLAS and weights, measures them with
`outrider bench --url`, and stops them.

    python -m benchmarks.peers [MODEL] [--peers mlx-lm vllm-mlx] [--vllm-mlx-python FILE] [-- bench options]

On a CPU all servers get a float32 copy of the model. Options after `--` go to `outrider bench`.
docs/BENCHMARKS.md says what the other servers need.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.float32_copy import write_float32_copy
from outrider.files.cache_folder import cache_folder
from outrider.llm import default_model
from outrider.models import machine
from outrider.models.loader import find_folder

HERE = Path(__file__).resolve().parent
LAUNCHER = HERE / "peer.py"
START_TIMEOUT_S = 180.0  # seconds until a server must be healthy; chosen by hand
STOP_TIMEOUT_S = 15.0  # seconds between SIGTERM and SIGKILL; chosen by hand


@dataclass(frozen=True)
class Peer:
    """How a server is started. The words PORT and MODEL in the command are replaced."""

    name: str
    command: list[str]
    environ: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunningServer:
    peer: Peer
    port: int
    process: subprocess.Popen[bytes]
    log: Path


def main() -> int:
    args, bench_options = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped
    with tempfile.TemporaryDirectory(prefix="outrider-peers-") as scratch, contextlib.ExitStack() as stack:
        model = _model(args.model or default_model(), Path(scratch))
        running = [
            stack.enter_context(_started(peer, model, Path(scratch))) for peer in _peers(args, Path(scratch))
        ]
        for one in running:
            _wait_until_healthy(one)
            print(f"{one.peer.name} listens on port {one.port}", flush=True)
        return _bench(model, running, bench_options)


def _model(given: str | Path, scratch: Path) -> str:
    folder = find_folder(given)
    if machine.device_name() != "cpu":
        return str(folder)
    return str(write_float32_copy(folder, scratch / "models" / folder.name))


def _peers(args: argparse.Namespace, scratch: Path) -> list[Peer]:
    """Outrider first. A server that caches prompts on disk gets an empty home folder."""
    rows = str(args.rows)
    served = ["MODEL", "--port", "PORT"]
    mlx_lm = [args.mlx_lm_python, str(LAUNCHER), "mlx_lm.server", "--model", *served]
    mlx_lm += ["--decode-concurrency", rows, "--prompt-concurrency", rows, "--log-level", "WARNING"]
    vllm_mlx = [args.vllm_mlx_python, str(LAUNCHER), "vllm_mlx.cli", "serve", *served]
    vllm_mlx += ["--host", "127.0.0.1", "--continuous-batching", "--max-num-seqs", rows]
    known = {
        "mlx-lm": Peer("mlx-lm", mlx_lm),
        "vllm-mlx": Peer("vllm-mlx", vllm_mlx, {"HOME": str(scratch), "OUTRIDER_CACHE": str(cache_folder())}),
    }
    ours = [sys.executable, "-m", "outrider", "serve", *served, "--max-rows", rows, "--log-level", "warning"]
    ours.append("--no-supervisor")  # so that the process is the server, whose memory is measured
    return [Peer("outrider", ours), *(known[name] for name in args.peers)]


@contextlib.contextmanager
def _started(peer: Peer, model: str, scratch: Path) -> Iterator[RunningServer]:
    port, log = _free_port(), scratch / f"{peer.name}.log"
    values = {"PORT": str(port), "MODEL": model}
    command = [values.get(word, word) for word in peer.command]
    if shutil.which(command[0]) is None:
        sys.exit(f"{peer.name}: no Python at {command[0]}")
    environ = {
        name: text for name, text in os.environ.items() if name != "PYTHONPATH" or peer.name == "outrider"
    }
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environ | peer.environ)
    try:
        yield RunningServer(peer, port, process, log)
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_healthy(one: RunningServer) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _is_healthy(one.port):
        if one.process.poll() is not None or time.monotonic() > deadline:
            tail = one.log.read_text(errors="replace")[-2000:]
            sys.exit(f"{one.peer.name} did not start:\n{tail}")
        time.sleep(0.3)


def _is_healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _bench(model: str, running: Sequence[RunningServer], bench_options: Sequence[str]) -> int:
    command = [sys.executable, "-m", "outrider", "bench", model]
    for one in running:
        command += ["--url", f"{one.peer.name}=http://127.0.0.1:{one.port}"]
        if sys.platform == "linux":
            command += ["--pid", str(one.process.pid)]
    for name in ("outrider off", *(one.peer.name for one in running[1:])):
        command += ["--baseline", name]
    try:
        return subprocess.run([*command, *bench_options], check=False).returncode
    except KeyboardInterrupt:  # the benchmark got it, too, and has printed its figures
        return 130


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="model folder (default: the default model)")
    parser.add_argument(
        "--peers", nargs="+", default=["mlx-lm"], choices=["mlx-lm", "vllm-mlx"], help="(default: mlx-lm)"
    )
    parser.add_argument(
        "--mlx-lm-python",
        default=sys.executable,
        metavar="FILE",
        help="Python with mlx-lm (default: this one)",
    )
    parser.add_argument(
        "--vllm-mlx-python", default="python-with-vllm-mlx", metavar="FILE", help="Python with vllm-mlx"
    )
    parser.add_argument(
        "--rows", type=int, default=16, help="requests that each server may batch (default: 16)"
    )
    return parser.parse_args(words[:split]), words[split + 1 :]


if __name__ == "__main__":
    sys.exit(main())
