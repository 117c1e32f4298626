"""Steps of a model on several ranks of this machine, against the model of their cost in benchmarks/ranks.py.

    python -m benchmarks.rank_steps [--ranks 2 3] [--rows 1 4]

A random model with 12 heads runs on one rank, then on several. The ranks share this machine's cores: if one
rank keeps all of them busy, several ranks read the weights no faster. So the model of cost gives two limits:

    step(N) = step(1) / N, or step(1)  +  2 x layers x sum(N)  +  the plan's message

where the time of a sum over the ranks is measured too, in the same processes.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.step.ranks import Ranks

NUM_LAYERS, HIDDEN_SIZE = 12, 384
NUM_SUMS = 60
FIRST_TOKENS, LAST_TOKENS = 8, 40  # steps between these tokens of the first row are timed
SHAPE = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 4 * HIDDEN_SIZE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}


def sum_s(ranks: Ranks, num_rows: int) -> float:
    """Median seconds of a sum over all ranks. All ranks call this."""
    import mlx.core as mx

    from outrider.rank_sums import sum_over_ranks

    times = []
    for _ in range(NUM_SUMS):
        began_s = time.perf_counter()
        mx.eval(sum_over_ranks(mx.zeros((num_rows, HIDDEN_SIZE)), ranks.group))
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def step_s(folder: str, num_rows: int, ranks: Ranks | None) -> float:
    """Mean seconds of a decode step."""
    from outrider.build import ModelChoice, build_engine
    from outrider.config import EngineConfig
    from outrider.engine_place import EnginePlace
    from outrider.request import SamplingParams

    config = EngineConfig(max_rows=num_rows, drafter="none", auto_depth=0)
    engine, _ = build_engine(ModelChoice(folder), config, place=EnginePlace(ranks=ranks))
    params = SamplingParams(max_tokens=LAST_TOKENS + 8, ignore_eos=True, temperature=0)
    outboxes = [engine.submit(engine.validate([3 + i, 4, 5], params)) for i in range(num_rows)]
    marks = []
    for num_tokens in (FIRST_TOKENS, LAST_TOKENS):
        while outboxes[0].num_tokens < num_tokens:
            outboxes[0].take(1.0)
        marks.append((time.perf_counter(), engine.num_steps))
    engine.close()
    (began_s, first), (ended_s, last) = marks
    return (ended_s - began_s) / (last - first)


def rank_main(folder: str, num_rows: int) -> None:
    """One rank: rank 0 prints what it has measured."""
    import mlx.core as mx

    from outrider.build import ModelChoice, follow_rank_0
    from outrider.config import EngineConfig
    from outrider.step.ranks import Ranks

    ranks = Ranks(mx.distributed.init(strict=True)) if "MLX_HOSTFILE" in os.environ else None
    found = {"sum_s": 0.0 if ranks is None else sum_s(ranks, num_rows), "message_s": 0.0}
    if ranks is not None and ranks.rank > 0:
        for _ in range(NUM_SUMS):
            ranks.receive()
        follow_rank_0(ModelChoice(folder), EngineConfig(drafter="none", auto_depth=0), ranks)
        return
    if ranks is not None:
        began_s = time.perf_counter()
        for _ in range(NUM_SUMS):
            ranks.send([0] * 100)
        found["message_s"] = (time.perf_counter() - began_s) / NUM_SUMS
    print(json.dumps({**found, "step_s": step_s(folder, num_rows, ranks)}))


def measured(folder: str, num_ranks: int, num_rows: int) -> dict[str, float]:
    with ExitStack() as stack:
        hosts = Path(folder, f"hosts-{num_ranks}.json")
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num_ranks)]
        hosts.write_text(json.dumps([[f"127.0.0.1:{one.getsockname()[1]}"] for one in sockets]))
        for one in sockets:
            one.close()
        command = [
            sys.executable,
            "-m",
            "benchmarks.rank_steps",
            "--of-rank",
            folder,
            "--rows",
            str(num_rows),
        ]
        variables = {"MLX_HOSTFILE": str(hosts)} if num_ranks > 1 else {}
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    command,
                    env={**os.environ, **variables, "MLX_RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(num_ranks)
        ]
        for rank in ranks:
            stack.callback(rank.kill)
        found: dict[str, float] = json.loads(ranks[0].communicate()[0].splitlines()[-1])
        return found


def compare(num_ranks: list[int], num_rows: list[int]) -> None:
    from tests.tiny_models import write_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        changes: dict[str, Any] = SHAPE
        write_checkpoint(Path(folder), "llama", **changes)
        for rows in num_rows:
            alone = measured(folder, 1, rows)
            print(f"{rows} rows: 1 rank {1e3 * alone['step_s']:.1f} ms a step")
            for number in num_ranks:
                found = measured(folder, number, rows)
                sent_s = 2 * NUM_LAYERS * found["sum_s"] + found["message_s"]
                low_ms, high_ms = (1e3 * (alone["step_s"] / parts + sent_s) for parts in (number, 1))
                print(
                    f"  {number} ranks: {1e3 * found['step_s']:.1f} ms; predicted {low_ms:.1f} to "
                    f"{high_ms:.1f} ({2 * NUM_LAYERS} sums of {1e3 * found['sum_s']:.2f} ms, a message of "
                    f"{1e3 * found['message_s']:.2f} ms)"
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--of-rank", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.of_rank:
        rank_main(args.of_rank, args.rows[0])
    else:
        compare(args.ranks, args.rows)


if __name__ == "__main__":
    main()
