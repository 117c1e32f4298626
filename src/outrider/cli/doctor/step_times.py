"""What a decode step takes on this device, by rows and width, with a model of random weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.cli.doctor.random_model import RandomModel
from outrider.models import machine
from outrider.plan import BLOCK_SIZE
from outrider.speculate.calibration import StepTimer, SyntheticStep
from outrider.step.runner import Runner

RUNS = 3  # of each step; the shortest counts


@dataclass(frozen=True)
class StepTimes:
    model: str
    rows: tuple[int, ...]
    widths: tuple[int, ...]
    milliseconds: tuple[tuple[float, ...], ...]  # [rows][widths]


def step_times(
    model: RandomModel, rows: Sequence[int], widths: Sequence[int], on_step: Callable[[], None]
) -> StepTimes:
    """`on_step` is called after each shape."""
    outruns = machine.outruns_host()
    block_size = BLOCK_SIZE if model.trunk.reads_blocks else None
    runner = Runner(model.trunk, None, compiles=outruns, block_size=block_size)
    timer = StepTimer(runner, model.trunk.vocab_size, machine.step_clock())
    for num_rows in rows:
        for width in widths:
            for _ in range(RUNS):
                timer.time_once(SyntheticStep(num_rows, width))
            on_step()
    runner.reset()
    found = timer.shortest
    return StepTimes(
        model.name,
        tuple(rows),
        tuple(widths),
        tuple(tuple(1e3 * found[SyntheticStep(num, width)] for width in widths) for num in rows),
    )
