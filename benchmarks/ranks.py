"""How much faster a model decodes on several machines: a model of a step's cost, from a few figures.

    python -m benchmarks.ranks                  # predictions for Qwen3.5-27B and 122B-A10B on 2 and 4 Macs
    python -m benchmarks.ranks --measure        # the same figures of MLX's ring on this machine's loopback

A decode step on one machine takes as long as its memory takes to deliver the weights. On N ranks each
delivers a part of them, and every layer has two sums over all ranks (after attention, after the MLP). The
ranks gather the parts of a sum (rank_sums.py), of the logits, and the plan's message: a ring sends N - 1
messages for each, one after the other.

    step(N) = bytes / (N x bandwidth)
              + layers x 2 x (N - 1) x (latency + vector / link)
              + (N - 1) x (latency + logits / (N x link))  +  plan's message

The model has no time of the host (plan, sampling, launches), and none for a rank that waits for a slower one.
benchmarks/rank_steps.py measures the parts, and these, on ranks of one machine.

In a pipeline each rank has whole layers: a step takes as long as on one machine, and N - 1 messages more.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Link:
    name: str
    latency_s: float  # of one message between two machines
    bytes_per_s: float


@dataclass(frozen=True)
class Model:
    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_bytes: float  # of the weights that a token reads, output projection included


# Published figures, rounded: Thunderbolt 5 carries 80 Gbit/s, and its RDMA is said to take 5 to 10 us; TCP
# takes about 100 us on 10 Gbit Ethernet. An M3 Ultra has 819 GB/s of memory bandwidth; 0.8 of it are assumed.
LINKS = (Link("Thunderbolt 5, RDMA", 10e-6, 8e9), Link("10 Gbit Ethernet, TCP", 100e-6, 1.1e9))
BANDWIDTH = 0.8 * 819e9
MODELS = (
    Model("Qwen3.5-27B, 4 bits", 64, 5120, 248_320, 14.8e9),
    Model("Qwen3.5-122B-A10B, 4 bits", 48, 3072, 248_320, 5.6e9),
)


def step_s(model: Model, link: Link | None, num_ranks: int, tokens: int = 1) -> float:
    """Seconds of a decode step that feeds so many tokens, so few that the weights' bytes decide."""
    read_s = model.num_bytes / num_ranks / BANDWIDTH
    if num_ranks == 1 or link is None:
        return read_s
    vector, logits = 2.0 * model.hidden_size * tokens, 2.0 * model.vocab_size * tokens
    messages = num_ranks - 1
    sum_s = messages * (link.latency_s + vector / link.bytes_per_s)
    logits_s = messages * (link.latency_s + logits / (num_ranks * link.bytes_per_s))
    plan_s = messages * (link.latency_s + 4096 / link.bytes_per_s)
    return read_s + 2 * model.num_layers * sum_s + logits_s + plan_s


def pipeline_s(model: Model, link: Link, num_ranks: int) -> float:
    """Seconds of a decode step if each rank has whole layers, and one step is under way at a time."""
    sent_s = link.latency_s + 2.0 * model.hidden_size / link.bytes_per_s
    return step_s(model, None, 1) + (num_ranks - 1) * sent_s


def predict() -> None:
    for model in MODELS:
        alone_s = step_s(model, None, 1)
        print(f"{model.name}: {1e3 * alone_s:.1f} ms a step on one machine")
        for link in LINKS:
            for num_ranks in (2, 4):
                found = {tokens: step_s(model, link, num_ranks, tokens) for tokens in (1, 8)}
                ratios = ", ".join(f"{alone_s / s:.2f} with {n} tokens" for n, s in found.items())
                chain = alone_s / pipeline_s(model, link, num_ranks)
                print(f"  {num_ranks} machines, {link.name}: {ratios} a step; pipeline {chain:.2f}")


WORKER = """
import statistics, time
import mlx.core as mx
from outrider.rank_sums import sum_over_ranks
group = mx.distributed.init(strict=True)
for tokens, size in ((1, 576), (8, 576), (1, 5120), (8, 5120)):
    x = mx.zeros((tokens, size))
    found = {}
    for name, add in (("all_sum", mx.distributed.all_sum), ("sum_over_ranks", sum_over_ranks)):
        times = []
        for _ in range(60):
            began = time.perf_counter()
            mx.eval(add(x, group=group))
            times.append(time.perf_counter() - began)
        found[name] = f"{name} {1e3 * statistics.median(times):.2f} ms"
    if group.rank() == 0:
        print(f"  [{tokens}, {size}] over {group.size()} ranks: {', '.join(found.values())}")
"""


def measure(num_ranks: int) -> None:
    """Sums over ranks on this machine: what loopback and its cores take."""
    launch = [str(Path(sys.executable).with_name("mlx.launch")), "-n", str(num_ranks), "--backend", "ring"]
    began = time.perf_counter()
    subprocess.run([*launch, "--", sys.executable, "-c", WORKER], check=True, env=os.environ)
    print(f"  ({time.perf_counter() - began:.0f} s with the start)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", action="store_true", help="time sums over 2 and 3 ranks on this machine")
    if parser.parse_args().measure:
        for num_ranks in (2, 3):
            measure(num_ranks)
    predict()


if __name__ == "__main__":
    main()
