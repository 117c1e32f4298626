"""What each rank reads when it loads its part, how long that takes, what it holds: ranks on this machine.

    python -m benchmarks.rank_loading [--ranks 2 4] [--bits 4] [--family llama] [--folder MODEL]

Writes a random model (in 4 bits: 100 to 300 MB), or takes a folder. Each rank loads its part. Bytes are those
that the kernel has counted (/proc/self/io, `rchar`: also bytes that it had in memory); the files are dropped
from the kernel's memory before each run, as far as the file system allows it. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "hidden_size": 768,
    "vocab_size": 8192,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 24,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
EXPERTS = {"moe_intermediate_size": 768, "num_experts": 16, "num_hidden_layers": 12}
MB = 1e6


def rank_main(folder: str) -> None:
    """One rank: prints what its load took."""
    import mlx.core as mx

    from outrider.models import loader

    group = mx.distributed.init(strict=True)
    mx.eval(mx.distributed.all_sum(mx.ones(1), group=group))  # all ranks have begun
    mx.reset_peak_memory()
    before, began_s = num_bytes_read(), time.perf_counter()
    loaded = loader.load(folder, group=group)
    found = {
        "rank": group.rank(),
        "MB": (num_bytes_read() - before) / MB,
        "s": time.perf_counter() - began_s,
        "peak MB": mx.get_peak_memory() / MB,
        "held MB": mx.get_active_memory() / MB,
    }
    assert loaded.trunk is not None
    print(json.dumps(found), flush=True)


def num_bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def drop_from_memory(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measured(folder: Path, num_ranks: int) -> list[dict[str, float]]:
    """By rank."""
    with ExitStack() as stack:
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num_ranks)]
        hosts = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".json"))
        json.dump([[f"127.0.0.1:{one.getsockname()[1]}"] for one in sockets], hosts)
        hosts.flush()
        for one in sockets:
            one.close()
        command = "import outrider, benchmarks.rank_loading as b; b.main()"
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", command, "--of-rank", str(folder)],
                    env={**os.environ, "MLX_HOSTFILE": hosts.name, "MLX_RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(num_ranks)
        ]
        for rank in ranks:
            stack.callback(rank.kill)
        return [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]


def report(folder: Path, counts: list[int]) -> None:
    size = sum(path.stat().st_size for path in folder.glob("model*.safetensors"))
    print(f"{size / MB:.0f} MB of weights")
    for num_ranks in counts:
        drop_from_memory(folder)
        for found in measured(folder, num_ranks):
            print(
                f"  rank {found['rank']:.0f} of {num_ranks}: read {found['MB']:.0f} MB "
                f"({100 * found['MB'] * MB / size:.0f} %) in {found['s']:.2f} s, "
                f"held {found['held MB']:.0f} MB, at most {found['peak MB']:.0f} MB",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--bits", type=int, choices=(4, 8), help="of quantised weights (default: float32)")
    parser.add_argument("--family", choices=("llama", "qwen3_moe", "qwen3_5"), default="llama")
    parser.add_argument("--folder", type=Path, help="a model (default: a random one)")
    parser.add_argument("--of-rank", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.of_rank:
        rank_main(args.of_rank)
        return
    with tempfile.TemporaryDirectory() as made:
        if args.folder is None:
            from tests.tiny_models import write_checkpoint

            name = args.family if args.bits is None else f"{args.family}-{args.bits}bit"
            shape = SHAPE | (EXPERTS if args.family == "qwen3_moe" else {})
            write_checkpoint(Path(made), name, **shape)
        report(args.folder or Path(made), args.ranks)


if __name__ == "__main__":
    main()
