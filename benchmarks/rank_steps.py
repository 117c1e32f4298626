"""Where the time of a step goes on several ranks of this machine, against a model of its cost.

    python -m benchmarks.rank_steps [--ranks 2 3] [--rows 1 4] [--bits 4] [--threads 1]

A random model decodes on one rank, then on several. The parts of a step are measured in the same processes,
by all ranks at the same time, since the ranks share this machine's cores:

    pass       over this rank's part of the layers, without the sums over the ranks
    sum        of one layer's output over the ranks, between two pieces of work: what a pass with its sums
               takes longer than one without, divided by their number
    logits     gathered from all ranks
    message    of rank 0: the plan of a step
    rest       of a step on one rank beside its pass: plan, output projection, sampling, text

    step(N) = pass(N) + 2 x layers x sum(N) + logits(N) + message(N) + rest

Between two steps, by the clock that all processes of a machine share:

    turn       from rank 0's read of a step to the first layers of the next one on another rank
    wait       of another rank for a plan, after all its work is done; then the time until its first layers

benchmarks/ranks.py has the same model for other machines, with pass(N) = bytes / (N x bandwidth) and no rest.
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
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.models.trunk import Trunk
    from outrider.step.ranks import Ranks

NUM_LAYERS, HIDDEN_SIZE, VOCAB_SIZE = 12, 384, 8192
NUM_SUMS, NUM_PASSES, NUM_STEPS = 500, 200, 300
MESSAGE = [0] * 100  # numbers, as in a decode step of a few rows
PAST, CAPACITY = 16, 64  # cells
SHAPE = {
    "hidden_size": HIDDEN_SIZE,
    "vocab_size": VOCAB_SIZE,
    "intermediate_size": 4 * HIDDEN_SIZE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}


# One rank ---------------------------------------------------------------------------------------------------


def median_s(work: Callable[[], object], num: int) -> float:
    times = []
    for _ in range(num):
        began_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def decode_pass(trunk: Trunk, num_rows: int) -> Callable[[], None]:
    import mlx.core as mx

    from outrider.cache.placement import Placement
    from outrider.models.trunk import TrunkCache

    cache = TrunkCache(trunk.layout)
    for buffers in cache.buffers():
        buffers.resize(num_rows, CAPACITY)
    token_ids, starts = mx.ones((num_rows, 1), mx.int32), mx.full(num_rows, PAST)
    fed = mx.ones(num_rows, mx.int32)

    def run() -> None:
        place = Placement(range(num_rows), starts, fed, 1, PAST + 1, CAPACITY, any_new=False, launches=True)
        hidden = trunk.hidden(token_ids, cache, place)
        mx.eval(hidden, [array for buffers in cache.buffers() for array in buffers.arrays()])

    return run


def parts_of_step(folder: str, num_rows: int, ranks: Ranks | None) -> dict[str, float]:
    """Median seconds of each part. All ranks call this."""
    import mlx.core as mx

    from outrider.models import loader
    from outrider.rank_sums import sum_over_ranks, without_sums

    trunk = loader.load(folder, group=None if ranks is None else ranks.group).trunk
    trunk.prepare_for_serving()
    run_pass = decode_pass(trunk, num_rows)
    if ranks is None:
        return {"pass": median_s(run_pass, NUM_PASSES)}
    run_pass()  # all ranks have loaded their part
    with without_sums(trunk.model):
        found = {"pass": median_s(run_pass, NUM_PASSES)}
    group = ranks.group
    vector, logits = mx.zeros((num_rows, HIDDEN_SIZE)), mx.zeros((num_rows, VOCAB_SIZE // ranks.size))
    gather = mx.distributed.all_gather
    meet = (lambda: ranks.send(MESSAGE)) if ranks.rank == 0 else ranks.receive
    found["sum"] = median_s(lambda: mx.eval(sum_over_ranks(vector, group)), NUM_SUMS)
    found["logits"] = median_s(lambda: mx.eval(gather(logits[None], group=group)), NUM_SUMS)
    found["message"] = median_s(meet, NUM_SUMS)
    found["summed pass"] = median_s(run_pass, NUM_PASSES)
    return found


class StepTimes:
    """When rank 0 has launched and read each step, and how long its messages took."""

    def __init__(self, engine: Engine, ranks: Ranks | None) -> None:
        runner: Any = engine._loop.parts.runner
        self._launch, self._finish = runner.launch, runner.finish
        runner.launch, runner.finish = self.launch, self.finish
        if ranks is not None:
            self._send, ranks.send = ranks.send, self.send  # type: ignore[method-assign]
        self.launched_s: list[float] = []
        self.read_s: list[float] = []
        self.sent_s: list[float] = []
        self.num_bytes: list[float] = []
        self._ranks = ranks

    def launch(self, *step: Any) -> Any:
        self.launched_s.append(time.perf_counter())
        return self._launch(*step)

    def finish(self, *step: Any) -> Any:
        result = self._finish(*step)
        self.read_s.append(time.perf_counter())
        return result

    def send(self, numbers: Any, **options: Any) -> None:
        assert self._ranks is not None
        began_s, before = time.perf_counter(), self._ranks.num_bytes_sent
        self._send(numbers, **options)
        self.sent_s.append(time.perf_counter() - began_s)
        self.num_bytes.append(self._ranks.num_bytes_sent - before)

    def medians(self) -> dict[str, float]:
        num_read, last = len(self.read_s), slice(-NUM_STEPS, None)  # without the prompts
        launched, read = self.launched_s[:num_read][last], self.read_s[:num_read][last]
        between = zip(read, launched[1:], strict=False)
        return {
            "step": statistics.median(later - sooner for sooner, later in pairwise(launched)),
            "host": statistics.median(launch - read for read, launch in between),
            "send": statistics.median(self.sent_s[last] or [0.0]),
            "bytes": statistics.median(self.num_bytes[last] or [0.0]),
        }


class FollowerTimes:
    """When another rank had done a step, has got the next plan, and began its first layers."""

    def __init__(self, ranks: Ranks) -> None:
        from outrider.models.trunk import Trunk

        self._receive, ranks.receive = ranks.receive, self.receive  # type: ignore[method-assign]
        self._hidden, times = Trunk.hidden, self

        def hidden(trunk: Trunk, *inputs: Any, **named: Any) -> Any:
            times.began_s.setdefault(len(times.got_s), time.perf_counter())
            return times._hidden(trunk, *inputs, **named)

        Trunk.hidden = hidden  # type: ignore[method-assign]
        self.done_s: list[float] = []
        self.got_s: list[float] = []
        self.began_s: dict[int, float] = {}  # by number of the step, from 1 on

    def receive(self) -> Any:
        import mlx.core as mx

        from outrider.step import step_message

        mx.synchronize()
        done_s = time.perf_counter()
        message = self._receive()
        if int(message[0]) == step_message.STEP:
            self.done_s.append(done_s)
            self.got_s.append(time.perf_counter())
        return message


def between_steps(read_s: list[float], follower: dict[str, list[float]]) -> dict[str, float]:
    """Median seconds between two steps: see the top of this module. Both have the same last step."""
    done, got, began = (follower[name][-NUM_STEPS:] for name in ("done", "got", "began"))
    waits = [later - sooner for sooner, later in zip(done, got, strict=True)]
    builds = [later - sooner for sooner, later in zip(got, began, strict=True)]
    turns = [later - sooner for sooner, later in zip(read_s[-NUM_STEPS:-1], began[1:], strict=True)]
    parts = {"wait": waits, "build": builds, "turn": turns}
    return {name: statistics.median(values) for name, values in parts.items()}


def decode_steps(folder: str, num_rows: int, ranks: Ranks | None) -> dict[str, Any]:
    """Median seconds of a decode step of the engine, and of what rank 0 does between two steps."""
    from outrider.build import ModelChoice, build_engine
    from outrider.config import EngineConfig
    from outrider.engine_place import EnginePlace
    from outrider.request import SamplingParams

    config = EngineConfig(max_rows=num_rows, drafter="none", auto_depth=0)
    engine, _ = build_engine(ModelChoice(folder), config, place=EnginePlace(ranks=ranks))
    times = StepTimes(engine, ranks)
    params = SamplingParams(max_tokens=NUM_STEPS + 16, ignore_eos=True, temperature=0)
    outboxes = [engine.submit(engine.validate([3 + i, 4, 5], params)) for i in range(num_rows)]
    while outboxes[0].num_tokens < NUM_STEPS + 8:
        outboxes[0].take(0.1)
    found = times.medians()
    engine.close()
    return found | {"read": times.read_s}


def rank_main(folder: str, num_rows: int) -> None:
    """One rank: prints what it has measured."""
    import mlx.core as mx

    from outrider.build import ModelChoice, follow_rank_0
    from outrider.config import EngineConfig
    from outrider.step.ranks import Ranks

    ranks = Ranks(mx.distributed.init(strict=True)) if "MLX_HOSTFILE" in os.environ else None
    found = parts_of_step(folder, num_rows, ranks)
    if ranks is not None and ranks.rank > 0:
        times = FollowerTimes(ranks)
        follow_rank_0(ModelChoice(folder), EngineConfig(drafter="none", auto_depth=0), ranks)
        began_s = [times.began_s.get(1 + i, got_s) for i, got_s in enumerate(times.got_s)]
        print(json.dumps({"done": times.done_s, "got": times.got_s, "began": began_s}))
        return
    print(json.dumps(found | decode_steps(folder, num_rows, ranks)))


# All ranks --------------------------------------------------------------------------------------------------


def measured(folder: str, num_ranks: int, num_rows: int, threads: int | None) -> dict[str, Any]:
    own = ["--of-rank", folder, "--rows", str(num_rows)]
    found, *others = (
        json.loads(line) for (line,) in run_ranks("benchmarks.rank_steps", own, num_ranks, folder, threads)
    )
    read_s = found.pop("read")
    return found | (between_steps(read_s, others[0]) if others else {})


def run_ranks(
    module: str, arguments: list[str], num_ranks: int, folder: str, threads: int | None
) -> list[list[str]]:
    """Run `main` of a benchmark as so many ranks. Returns the last line of each, if it has one."""
    with ExitStack() as stack:
        hosts = Path(folder, f"hosts-{num_ranks}.json")
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num_ranks)]
        hosts.write_text(json.dumps([[f"127.0.0.1:{one.getsockname()[1]}"] for one in sockets]))
        for one in sockets:
            one.close()
        command = [sys.executable, "-c", f"import outrider, {module} as b; b.main()", *arguments]
        variables = {"MLX_HOSTFILE": str(hosts)} if num_ranks > 1 else {}
        if threads is not None:
            variables["OUTRIDER_BLAS_THREADS"] = str(threads)
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
        return [rank.communicate()[0].splitlines()[-1:] for rank in ranks]


def report(num_ranks: int, found: dict[str, float], alone: dict[str, float]) -> None:
    ms = {name: 1e3 * seconds for name, seconds in found.items()}
    rest = 1e3 * (alone["step"] - alone["pass"])
    num_sums = 2 * NUM_LAYERS
    own_sum = (ms["summed pass"] - ms["pass"]) / num_sums
    predicted = ms["pass"] + num_sums * own_sum + ms["logits"] + ms["message"] + rest
    print(
        f"  {num_ranks} ranks: {ms['step']:.2f} ms a step, {predicted:.2f} predicted "
        f"({ms['step'] / predicted:.2f})\n"
        f"    pass {ms['pass']:.2f}, {num_sums} sums of {own_sum:.3f} (back to back {ms['sum']:.3f}), "
        f"logits {ms['logits']:.2f}, message {ms['message']:.3f}, rest {rest:.2f}\n"
        f"    in the steps: host between two steps {ms['host']:.2f}, message {ms['send']:.3f} "
        f"({found['bytes']:.0f} bytes, {100 * ms['send'] / ms['step']:.1f} %)\n"
        f"    on rank 1: turn {ms['turn']:.3f}, of which wait {ms['wait']:.3f}, then {ms['build']:.3f}",
        flush=True,
    )


def compare(num_ranks: list[int], num_rows: list[int], bits: int | None, threads: int | None) -> None:
    from tests.tiny_models import write_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        changes: dict[str, Any] = SHAPE
        write_checkpoint(Path(folder), "llama" if bits is None else f"llama-{bits}bit", **changes)
        for rows in num_rows:
            alone = measured(folder, 1, rows, threads)
            print(
                f"{rows} rows: 1 rank {1e3 * alone['step']:.2f} ms a step, pass {1e3 * alone['pass']:.2f}, "
                f"host between two steps {1e3 * alone['host']:.2f}",
                flush=True,
            )
            for number in num_ranks:
                report(number, measured(folder, number, rows, threads), alone)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--bits", type=int, choices=(4, 8), help="of quantised weights (default: float32)")
    parser.add_argument("--threads", type=int, help="of each rank (default: as the server has)")
    parser.add_argument("--of-rank", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.of_rank:
        rank_main(args.of_rank, args.rows[0])
    else:
        compare(args.ranks, args.rows, args.bits, args.threads)


if __name__ == "__main__":
    main()
