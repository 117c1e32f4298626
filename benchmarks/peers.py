"""Compares Outrider with other servers: starts each with the same model, measures them with
`outrider bench --url`, and stops them.

    python -m benchmarks.peers [MODEL] [--peers mlx-lm vllm-mlx] [--vllm-mlx-python FILE] [-- bench options]
    python -m benchmarks.peers [MODEL] --peers llama-cpp --llama-cpp-python FILE [--gguf FILE] [-- ...]

On a CPU, servers on MLX get the same BLAS and a float32 copy of the model. llama.cpp gets a GGUF file; then
Outrider gets the model as it is. Options after `--` go to `outrider bench`. docs/BENCHMARKS.md says what the
other servers need.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.default_gguf import default_gguf
from benchmarks.float32_copy import write_float32_copy
from benchmarks.server_process import DidNotStart, Peer, RunningServer, started, wait_until_healthy
from outrider.cpu.threads import usable_cpus
from outrider.files.cache_folder import cache_folder
from outrider.llm import default_model
from outrider.models import machine
from outrider.models.loader import find_folder

HERE = Path(__file__).resolve().parent
MLX_LAUNCHER = HERE / "peer.py"
LLAMA_CPP_LAUNCHER = HERE / "llama_cpp_server.py"
MLX_PEERS = ("mlx-lm", "vllm-mlx")


@dataclass(frozen=True)
class Models:
    """One model, in the forms that the servers read."""

    outrider: Path  # folder
    mlx: Path  # folder for servers on MLX; its path is the model's name in all requests
    gguf: Path | None  # None if llama.cpp is not measured


def main() -> int:
    args, bench_options = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped
    with tempfile.TemporaryDirectory(prefix="outrider-peers-") as scratch, contextlib.ExitStack() as stack:
        models = _models(args, Path(scratch))
        try:
            running = [
                stack.enter_context(started(peer, Path(scratch)))
                for peer in _peers(args, models, Path(scratch))
            ]
            for one in running:
                wait_until_healthy(one)
                print(f"{one.peer.name} listens on port {one.port}", flush=True)
        except DidNotStart as error:
            sys.exit(str(error))
        return _bench(models, running, bench_options)


def _models(args: argparse.Namespace, scratch: Path) -> Models:
    gguf = _gguf(args) if "llama-cpp" in args.peers else None
    folder = find_folder(args.model or args.gguf or default_model())
    if machine.device_name() != "cpu" or not set(args.peers).intersection(MLX_PEERS):
        return Models(folder, folder, gguf)
    copy = write_float32_copy(folder, scratch / "models" / folder.name)
    return Models(copy if gguf is None else folder, copy, gguf)


def _gguf(args: argparse.Namespace) -> Path:
    """The file that llama.cpp serves."""
    if args.gguf is not None:
        return args.gguf
    if args.model is None:
        return default_gguf()
    if Path(args.model).suffix == ".gguf":
        return Path(args.model)
    sys.exit(f"llama.cpp reads GGUF files: give one of {args.model} with --gguf FILE")


def _peers(args: argparse.Namespace, models: Models, scratch: Path) -> list[Peer]:
    """Outrider first."""
    known = {"mlx-lm": _mlx_lm, "vllm-mlx": _vllm_mlx, "llama-cpp": _llama_cpp}
    return [_outrider(args, models), *(known[name](args, models, scratch) for name in args.peers)]


def _outrider(args: argparse.Namespace, models: Models) -> Peer:
    command = [sys.executable, "-m", "outrider", "serve", str(models.outrider), "--port", "PORT"]
    command += ["--served-model-name", str(models.mlx), "--max-rows", str(args.rows)]
    command += ["--log-level", "warning"]
    command.append("--no-supervisor")  # so that the process is the server, whose memory is measured
    return Peer("outrider", command, is_outrider=True)


def _mlx_lm(args: argparse.Namespace, models: Models, scratch: Path) -> Peer:
    rows = str(args.rows)
    command = [args.mlx_lm_python, str(MLX_LAUNCHER), "mlx_lm.server", "--model", str(models.mlx)]
    command += ["--port", "PORT", "--decode-concurrency", rows, "--prompt-concurrency", rows]
    return Peer("mlx-lm", [*command, "--log-level", "WARNING"])


def _vllm_mlx(args: argparse.Namespace, models: Models, scratch: Path) -> Peer:
    """Caches prompts on disk, hence the empty home folder."""
    command = [args.vllm_mlx_python, str(MLX_LAUNCHER), "vllm_mlx.cli", "serve", str(models.mlx)]
    command += ["--port", "PORT", "--host", "127.0.0.1", "--continuous-batching"]
    environ = {"HOME": str(scratch), "OUTRIDER_CACHE": str(cache_folder())}
    return Peer("vllm-mlx", [*command, "--max-num-seqs", str(args.rows)], environ)


def _llama_cpp(args: argparse.Namespace, models: Models, scratch: Path) -> Peer:
    command = [args.llama_cpp_python, str(LLAMA_CPP_LAUNCHER), str(models.gguf), "--port", "PORT"]
    command += ["--slots", str(args.rows), "--context", str(args.context)]
    if sys.platform == "linux":
        command += ["--threads", str(usable_cpus())]
    return Peer("llama-cpp", command)


def _bench(models: Models, running: Sequence[RunningServer], bench_options: Sequence[str]) -> int:
    command = [sys.executable, "-m", "outrider", "bench", str(models.mlx)]
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
    parser.add_argument("model", nargs="?", help="model folder or GGUF file (default: the default model)")
    known = [*MLX_PEERS, "llama-cpp"]
    parser.add_argument("--peers", nargs="+", default=["mlx-lm"], choices=known, help="(default: mlx-lm)")
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
        "--llama-cpp-python", default="python-with-xllamacpp", metavar="FILE", help="Python with xllamacpp"
    )
    parser.add_argument(
        "--gguf",
        type=Path,
        metavar="FILE",
        help="model for llama.cpp, and for Outrider unless MODEL is given (default: MODEL if it is a GGUF "
        "file; without MODEL, the default model's file, which is downloaded once)",
    )
    parser.add_argument(
        "--rows", type=int, default=16, help="requests that each server may batch (default: 16)"
    )
    parser.add_argument(
        "--context",
        type=int,
        default=2048,
        help="tokens of a prompt and its answer, for which llama.cpp reserves memory (default: 2048)",
    )
    args = parser.parse_args(words[:split])
    _check(args, parser)
    return args, words[split + 1 :]


def _check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    for flag, value in (("--rows", args.rows), ("--context", args.context)):
        if value < 1:
            parser.error(f"{flag}: {value} is not at least 1")
    if args.gguf is not None and "llama-cpp" not in args.peers:
        parser.error("--gguf is for llama.cpp: add --peers llama-cpp")
    if args.gguf is not None and not args.gguf.is_file():
        parser.error(f"--gguf {args.gguf}: there is no such file")


if __name__ == "__main__":
    sys.exit(main())
