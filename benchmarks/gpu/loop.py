"""The engine's loop in this process, timed: plan, run, commit, as Engine does it.

There is no inbox, no outbox, no text and no prefix cache. Rows start from a prompt of random tokens. The
clock starts when all rows decode and a few steps are done.
"""

from __future__ import annotations

import random
import time
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.gpu.driver import Driver, Spent
from benchmarks.gpu.weights import Subject
from benchmarks.side_by_side import NullDetokenizer
from outrider.config import EngineConfig
from outrider.engine.draft_state import DraftState
from outrider.engine.memory_plan import plan_memory
from outrider.engine.scheduler import Scheduler
from outrider.engine.sequence import Sequence as Row
from outrider.models import machine
from outrider.plan import BLOCK_SIZE
from outrider.request import MAX_DEPTH, DraftDepth, Request, SamplingParams
from outrider.speculate.controller import DepthController
from outrider.step.runner import Runner

WARM_STEPS = 4  # steps before the clock starts; chosen by hand
MIN_STEPS = 8  # timed steps, even if the time is up; chosen by hand
PROMPT_CHUNK = 4096  # prompt tokens in a step; the timed steps decode
CAPACITY_STEP = 256  # cells by which cache buffers grow, as in the engine


@dataclass(frozen=True)
class TimedRun:
    """One timed run of one policy."""

    rows: int
    seconds: float
    steps: int
    tokens: int
    drafted: int
    spent: Spent  # by the host, over all steps
    busy_s: (
        float  # CPU time of this thread, over all steps; includes waiting for the device if the driver polls
    )

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    @property
    def stride(self) -> float:
        return self.tokens / self.steps / self.rows

    @property
    def mean_depth(self) -> float:
        return self.drafted / self.steps / self.rows

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Load:
    """The rows of a run, and its length."""

    rows: int
    num_prompt: int
    steps: int
    seconds: float  # the run ends after this time, but not before MIN_STEPS
    temperature: float = 0.0
    longest_prompt: int = 0  # of the first row, if it is to be longer than the others


class Loop:
    """Runs as an engine on this machine: compiled and overlapped if the device is faster than the host."""

    def __init__(
        self,
        subject: Subject,
        outruns: bool | None = None,
        in_blocks: bool = False,
        kv_bits: int | None = None,
    ) -> None:
        """`in_blocks`: rows keep their cells by blocks instead of slots. One loop at a time has `kv_bits`."""
        subject.trunk.use_kv_bits(kv_bits)
        self._trunk = subject.trunk
        self._outruns = machine.outruns_host() if outruns is None else outruns
        block_size = BLOCK_SIZE if in_blocks else None
        self.runner = Runner(subject.trunk, subject.head, compiles=self._outruns, block_size=block_size)
        self.budget_bytes = plan_memory(EngineConfig(), machine.free_bytes(), 0, False).rows

    def turn(self, policy: DraftDepth, load: Load, controller: DepthController) -> TimedRun:
        driver, rows = self.planned(policy, load, controller)
        try:
            until_decoding(driver, rows)
            return self._timed(driver, rows, load)
        finally:
            driver.leave()

    def planned(
        self, policy: DraftDepth, load: Load, controller: DepthController, chunk: int = PROMPT_CHUNK
    ) -> tuple[Driver, list[Row]]:
        """Rows that have not started yet, and their driver."""
        config = EngineConfig(max_rows=load.rows, prefill_step_size=chunk)
        scheduler = Scheduler(config, self.runner.geometry(CAPACITY_STEP), self.budget_bytes, controller)
        rows = self._new_rows(policy, load)
        for row in rows:
            scheduler.add(row)
        return Driver(scheduler, self.runner, self._outruns), rows

    def _timed(self, driver: Driver, rows: list[Row], load: Load) -> TimedRun:
        def counts() -> tuple[int, int]:
            return sum(row.num_generated for row in rows), sum(sum(row.counters.drafted) for row in rows)

        tokens, drafted = counts()
        began, busy = time.perf_counter(), time.thread_time()
        driver.spent = Spent()
        steps = 0
        while steps < load.steps and (steps < MIN_STEPS or time.perf_counter() - began < load.seconds):
            driver.step()
            steps += 1
        seconds, busy = time.perf_counter() - began, time.thread_time() - busy
        tokens_after, drafted_after = counts()
        return TimedRun(
            rows=len(rows),
            seconds=seconds,
            steps=steps,
            tokens=tokens_after - tokens,
            drafted=drafted_after - drafted,
            spent=driver.spent,
            busy_s=busy,
        )

    def _new_rows(self, policy: DraftDepth, load: Load) -> list[Row]:
        most = MAX_DEPTH if policy == "auto" else policy
        most_tokens = (load.steps + 4 * WARM_STEPS + load.rows * 8) * (MAX_DEPTH + 1)  # never reached
        rows = []
        lengths = [max(load.num_prompt, load.longest_prompt), *[load.num_prompt] * (load.rows - 1)]
        drawn = prompts(self._trunk.vocab_size, load.rows, max(lengths))
        for i, prompt in enumerate(own[:length] for own, length in zip(drawn, lengths, strict=True)):
            params = SamplingParams(
                max_tokens=most_tokens, temperature=load.temperature, seed=i, ignore_eos=True
            )
            request = Request(str(i), tuple(prompt), params)
            rows.append(
                Row(
                    i,
                    request,
                    NullDetokenizer(),
                    frozenset(),
                    most_tokens,
                    DraftState(most, most, can_pause_head=not self._outruns, is_auto=policy == "auto"),
                )
            )
        return rows


def until_decoding(driver: Driver, rows: list[Row]) -> None:
    """Reads all prompts, and runs a few steps more."""
    while not all(row.is_decoding for row in rows):
        driver.step()
    for _ in range(WARM_STEPS):
        driver.step()


def prompts(vocab_size: int, rows: int, length: int) -> list[list[int]]:
    numbers = random.Random(7)
    return [[numbers.randrange(vocab_size) for _ in range(length)] for _ in range(rows)]
