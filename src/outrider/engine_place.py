"""Where an engine runs: beside those of other models in this process, or on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from outrider.engine.device_turns import EngineTurns, TurnTakingRunner
from outrider.engine.memory_plan import MemoryShare
from outrider.models import machine
from outrider.plan import StepRunner
from outrider.step.ranks import Ranks
from outrider.step.runner import Runner


@dataclass(frozen=True)
class EnginePlace:
    """How an engine shares the process with those of other models, or its model with other processes."""

    turns: EngineTurns | None = None  # on the device
    memory: MemoryShare | None = None  # None: all that is free
    is_outlived: bool = False  # the process goes on after the engine
    ranks: Ranks | None = None  # the model runs on several ranks; this is rank 0, the others `follow_rank_0`
    check_wanted: Callable[[], None] = lambda: None  # raises if nobody waits for the engine any more

    def timing(self, runner: Runner) -> Timing:
        """Beside other models, the passes that are timed take turns with their steps."""
        turns = self.turns
        if turns is None or self.memory is None:
            return Timing(runner, machine.step_clock(), machine.extra_bytes)

        def extra_bytes(run: Callable[[], object]) -> int:
            with turns.held():
                return machine.extra_bytes(run)

        return Timing(
            cast(StepRunner, TurnTakingRunner(runner, turns, self.check_wanted)), turns.clock, extra_bytes
        )


@dataclass(frozen=True)
class Timing:
    """How the costs of a model's steps are measured."""

    runner: StepRunner
    clock: Callable[[], float]
    extra_bytes: Callable[[Callable[[], object]], int]  # memory that a function takes while it runs


ALONE = EnginePlace()
