"""Whole layers on each machine (a pipeline) against divided layers (benchmarks/ranks.py): figures on paper.

    python -m benchmarks.pipeline

A step of one row takes as long as on one machine that could hold the model: one machine after the other reads
its layers. So that all machines work at once, the rows are divided into as many groups as there are machines.
Each group then needs a pass of its own, which reads the weights again:

    round(N) = N x (weights that a group of rows reads / (N x bandwidth) + message)

In a dense model every pass reads all weights: a round takes as long as a step of one machine. In
a mixture of experts a group with fewer rows reads fewer experts, and machines together are faster than one.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.ranks import BANDWIDTH, LINKS, MODELS, Link, Model, pipeline_s, step_s

BYTES_PER_PARAMETER = 0.56  # in 4 bits, with scales
ACTIVE_SHARE = 8 / 256  # of the experts that a token reads, in Qwen3.5-122B-A10B
NUM_ROWS = 8
LATENCIES_US = range(1, 1000)


@dataclass(frozen=True)
class Machine:
    name: str
    memory_gb: float
    bandwidth: float  # bytes per second


UNEQUAL = (Machine("M3 Ultra", 256, 0.8 * 819e9), Machine("M4 Max", 128, 0.8 * 546e9))


def read_bytes(model: Model, num_rows: int) -> float:
    """Bytes of the weights that a pass with so many rows reads, each row of one token."""
    if "A10B" not in model.name:
        return step_s(model, None, 1) * BANDWIDTH
    active, total = 10e9, 122e9  # parameters; the shared ones follow from both
    experts = (total - active) / (1 - ACTIVE_SHARE)
    return BYTES_PER_PARAMETER * (total - experts + experts * (1 - (1 - ACTIVE_SHARE) ** num_rows))


def round_s(model: Model, link: Link, num_machines: int, num_rows: int) -> float:
    """Seconds in which every row gets a token, with the rows in as many groups as there are machines."""
    group = -(-num_rows // num_machines)
    sent_s = link.latency_s + 2.0 * model.hidden_size * group / link.bytes_per_s
    return read_bytes(model, group) / BANDWIDTH + num_machines * sent_s


def divided_s(model: Model, link: Link, num_machines: int, num_rows: int) -> float:
    """Seconds of a step with so many rows if the layers are divided."""
    without_link = step_s(model, Link("none", 0.0, 1e30), num_machines, num_rows)
    sums_s = step_s(model, link, num_machines, num_rows) - without_link
    return read_bytes(model, num_rows) / (num_machines * BANDWIDTH) + sums_s


def break_even_us(model: Model, num_machines: int) -> int:
    """The latency of a link above which a pipeline is faster than divided layers, for one row."""
    for latency_us in LATENCIES_US:
        link = Link("", latency_us * 1e-6, 8e9)
        if step_s(model, link, num_machines) > pipeline_s(model, link, num_machines):
            return latency_us
    raise ValueError("no break-even below a millisecond")


def main() -> None:
    for model in MODELS:
        alone_s = step_s(model, None, 1)
        alone_rows_s = read_bytes(model, NUM_ROWS) / BANDWIDTH
        print(f"{model.name}, against one machine that could hold it:")
        for link in LINKS:
            for number in (2, 4):
                ratios = {
                    "one row divided": alone_s / step_s(model, link, number),
                    "pipeline": alone_s / pipeline_s(model, link, number),
                    f"{NUM_ROWS} rows divided": alone_rows_s / divided_s(model, link, number, NUM_ROWS),
                    "pipeline ": alone_rows_s / round_s(model, link, number, NUM_ROWS),
                }
                text = ", ".join(f"{name.strip()} {ratio:.2f}" for name, ratio in ratios.items())
                print(f"  {number} machines, {link.name}: {text}")
        for number in (2, 4):
            print(
                f"  {number} machines: a pipeline is faster above {break_even_us(model, number)} us a message"
            )
    memory = [machine.memory_gb for machine in UNEQUAL]
    names = " and ".join(f"{machine.name} of {machine.memory_gb:.0f} GB" for machine in UNEQUAL)
    speed = (
        sum(memory) / sum(machine.memory_gb / machine.bandwidth for machine in UNEQUAL) / UNEQUAL[0].bandwidth
    )
    print(
        f"{names}: divided layers fill {len(memory) * min(memory):.0f} GB, a pipeline {sum(memory):.0f} GB; "
        f"with layers by memory it is {speed:.2f} times as fast as {UNEQUAL[0].name}s alone would be"
    )


if __name__ == "__main__":
    main()
