"""The memory of wide passes over prompts: measured, and as the planner of chunks predicts it.

On CUDA a wide pass multiplies by dequantised weights, and waits for the device so that few of them exist at
once. Each pass runs as it is, and without this wait.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import mlx.core as mx

from benchmarks.gpu.settings import CellResult, say
from benchmarks.gpu.weights import Subject
from outrider.build_caches import block_size_of
from outrider.cache import placement
from outrider.config import EngineConfig
from outrider.engine.memory_plan import plan_memory
from outrider.models import machine
from outrider.models.copied_weights import copied_bytes
from outrider.plan import PassShape, RowPlan, StepPlan
from outrider.request import MAX_DEPTH, SamplingParams
from outrider.speculate.calibration import step_of
from outrider.speculate.controller import DepthController
from outrider.speculate.costs import CostTable, guessed_costs
from outrider.speculate.prompt_calibration import measure_prompts
from outrider.speculate.prompt_costs import PromptShape
from outrider.step.runner import Runner

PASSES = ((512,), (1024,), (2048,), (700, 100, 100, 100))  # tokens of each row
NO_WAIT = 1000  # launches: more than a pass has
NUM_TIMED = 5  # runs of a pass; the median counts


class WidePasses:
    """Passes over the prompts of one model, with a runner as an engine has it on this machine."""

    def __init__(self, subject: Subject) -> None:
        trunk, outruns = subject.trunk, machine.outruns_host()
        self._vocab_size = trunk.vocab_size
        block_size = block_size_of(trunk, "auto")
        self._runner = Runner(trunk, subject.head, compiles=outruns, block_size=block_size)
        self.copied_bytes = copied_bytes(trunk, subject.head)
        memory = plan_memory(EngineConfig(), machine.free_bytes(), 0, False)
        context, extra_bytes = trunk.max_context, machine.extra_bytes
        self._measured = measure_prompts(
            self._runner, self._vocab_size, context, memory.rows, extra_bytes=extra_bytes
        )
        costs = CostTable(guessed_costs(), in_seconds=False)
        self._controller = DepthController(costs, None, outruns, self._measured, self.copied_bytes)

    def cell(self) -> CellResult:
        token_bytes = 0.0 if self._measured is None else self._measured.token_bytes
        found: CellResult = {"copied_bytes": self.copied_bytes, "token_bytes": token_bytes}
        say(
            f"  wide  dequantised {self.copied_bytes / 1e9:.3f} GB, for each token {token_bytes / 1e6:.3f} MB"
        )
        for lengths in PASSES:
            name = "+".join(map(str, lengths))
            found[name] = self._compared(lengths)
            line = "  wide  {name:>15}: peak {peak:.3f} GB, predicted {predicted:.3f}, ratio {ratio:.2f}, "
            line += "{ms:.1f} ms; without the wait {peak_2:.3f} GB, {ms_2:.1f} ms"
            own = found[name]
            gigabytes = {key: own[f"{key}_bytes"] / 1e9 for key in ("peak", "predicted")}
            free = own["without_wait"]
            gigabytes |= {"peak_2": free["peak_bytes"] / 1e9, "ms_2": free["ms"]}
            say(line.format(name=name, ratio=own["ratio"], ms=own["ms"], **gigabytes))
        self._runner.reset()
        return found

    def _compared(self, lengths: Sequence[int]) -> CellResult:
        """`ratio`: of the predicted memory to the measured one. Below 1 the planner counts too little."""
        shape = PromptShape()
        for length in lengths:
            shape = shape.plus(length, 0)
        predicted = self._controller.prompt_costs.pass_bytes(shape)
        plan = self._plan(lengths)
        own = self._measured_pass(plan)
        with mock.patch.object(placement, "MAX_LAUNCHED", NO_WAIT):
            free = self._measured_pass(plan)
        ratio = predicted / max(1, own["peak_bytes"])
        return {**own, "predicted_bytes": predicted, "ratio": ratio, "without_wait": free}

    def _measured_pass(self, plan: StepPlan) -> CellResult:
        self._runner.run(plan)  # makes the caches, and kernels of new shapes
        peaks = [machine.extra_bytes(lambda: self._runner.run(plan)) for _ in range(2)]
        seconds = []
        for _ in range(NUM_TIMED):
            began_s = time.perf_counter()
            self._runner.run(plan)
            seconds.append(time.perf_counter() - began_s)
        mx.clear_cache()
        return {"peak_bytes": max(peaks), "ms": 1e3 * statistics.median(seconds)}

    def _plan(self, lengths: Sequence[int]) -> StepPlan:
        rows = [self._row(slot, length) for slot, length in enumerate(lengths)]
        plan = step_of(self._runner.geometry(256), max(lengths) + 2 * MAX_DEPTH, rows)
        width = self._controller.shapes.prefill_width(max(lengths))
        return replace(plan, shapes=(PassShape(width=width),))

    def _row(self, slot: int, length: int) -> RowPlan:
        tokens = [(7 * i + 11 + slot) % self._vocab_size for i in range(length + 1)]
        return RowPlan(
            sequence_id=slot,
            slot=slot,
            start=0,
            token_ids=tokens[:-1],
            num_drafts=0,
            next_id=tokens[-1],
            feeds_head=True,
            num_drafts_next=0,
            params=SamplingParams(temperature=0, seed=0),
            history=tokens,
            num_prompt=len(tokens),
        )
