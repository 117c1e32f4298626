"""Shared by the benchmarks: one loaded model, our step driven directly, and mlx-lm's generator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from outrider.bench.prompts.chat import PROMPTS
from outrider.bench.statistics import Spread
from outrider.config import EngineConfig
from outrider.engine.draft_state import DraftState
from outrider.engine.scheduler import Scheduler
from outrider.engine.sequence import Sequence as Row
from outrider.models import heads, loader, machine
from outrider.models.files.shipped_head import shipped_head
from outrider.models.layer_swaps import without_speed_swaps
from outrider.plan import AdapterInfo
from outrider.request import MAX_DEPTH, DraftDepth, Request, SamplingParams
from outrider.speculate import calibration
from outrider.speculate.controller import DepthController
from outrider.speculate.costs import CostTable
from outrider.speculate.ngram import NgramDrafter
from outrider.speculate.per_draft import new_controller
from outrider.step.runner import Runner

BUDGET_BYTES = 8 << 30  # for caches: more than any of these runs needs


class NullDetokenizer:
    """Makes no text: the benchmarks time the step, not the detokenizer."""

    def push(self, token_id: int) -> tuple[str, str | None]:
        return "", None

    def flush(self) -> str:
        return ""


@dataclass(frozen=True)
class DecodeRun:
    """One timed run of decoding, which begins when the last prompt is prefilled."""

    seconds: float
    num_tokens: int
    num_steps: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


class StepBench:
    def __init__(
        self,
        model: str | Path,
        head: str | Path | None,
        draft_vocabulary: int | None,
        questions: Sequence[str] | None = None,
    ) -> None:
        self._questions = questions or PROMPTS
        machine.settle()
        self.loaded = loader.load(model)
        self.head = None
        file = Path(head) if head else heads.find_head(self.loaded.path) or shipped_head(self.loaded.path)
        if file is not None:
            self.head = heads.load_head(file, self.loaded.trunk, draft_vocabulary)
        self.loaded.trunk.prepare_for_serving()
        if self.head is not None:
            self.head.prepare_for_serving(self.loaded.trunk)
        self.runner = Runner(self.loaded.trunk, self.head)
        self.controller = DepthController()
        self.clock: Callable[[], float] = time.perf_counter  # for `ours`

    def measure_costs(self, max_rows: int) -> None:
        """Measures the costs that auto depth needs. The controller goes on learning from run to run."""
        clock = machine.step_clock()
        vocab_size = self.loaded.trunk.vocab_size
        found = calibration.measure(self.runner, vocab_size, max_rows, 4096, BUDGET_BYTES, clock=clock)
        assert found is not None
        self.controller = new_controller(CostTable(found), None, overlaps_steps=False)

    def prompts(self, num_rows: int, first: int = 0) -> list[list[int]]:
        template = self.loaded.tokenizer.apply_chat_template
        return [
            template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False)
            for text in islice(cycle(self._questions), first, first + num_rows)
        ]

    def ours(
        self,
        depths: Sequence[DraftDepth],
        num_tokens: int,
        temperature: float = 0.0,
        first_prompt: int = 0,
        adapters: Sequence[AdapterInfo | None] = (),
    ) -> tuple[DecodeRun, list[Row]]:
        """One row for each depth (0 is a plain row). Each row decodes `num_tokens` tokens.

        `adapters`: of the rows; none: no row has one.
        """
        config = EngineConfig(max_rows=len(depths))
        scheduler = Scheduler(config, self.runner.geometry(256), BUDGET_BYTES, self.controller)
        params = [
            SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=i, ignore_eos=True)
            for i in range(len(depths))
        ]
        rows = [
            Row(
                i,
                Request(str(i), tuple(prompt), params[i]),
                NullDetokenizer(),
                frozenset(),
                num_tokens,
                DraftState(
                    max_depth=MAX_DEPTH if depth == "auto" else depth,
                    head_depth=MAX_DEPTH if depth == "auto" else depth,
                    lookup=NgramDrafter() if depth == "auto" else None,
                    is_auto=depth == "auto",
                ),
            )
            for i, (prompt, depth) in enumerate(
                zip(self.prompts(len(depths), first_prompt), depths, strict=True)
            )
        ]
        for row, adapter in zip(rows, adapters, strict=False):
            row.adapter = adapter
        for row in rows:
            scheduler.add(row)
        started = tokens_before = steps = 0
        while not scheduler.is_idle:
            if not started and all(row.is_decoding for row in rows):
                started, tokens_before = self.clock(), sum(row.num_generated for row in rows)
            step = scheduler.plan()
            assert step is not None
            before = time.perf_counter()
            step.result = self.runner.run(step.plan)
            step.seconds = time.perf_counter() - before
            scheduler.commit(step)
            steps += bool(started)
        seconds = self.clock() - started
        self.runner.reset()
        return DecodeRun(seconds, sum(row.num_generated for row in rows) - tokens_before, steps), rows

    def mlx_lm(self, num_rows: int, num_tokens: int) -> DecodeRun:
        model = self.loaded.trunk.model
        with without_speed_swaps(model):
            generator = BatchGenerator(model, stop_tokens=[], max_tokens=num_tokens)
            generator.insert(self.prompts(num_rows), [num_tokens] * num_rows)
            with generator.stats() as stats:
                while generator.next_generated():
                    pass
            generator.close()
        return DecodeRun(stats.generation_time, stats.generation_tokens, num_tokens)

    def forward_ms(self, num_rows: int, width: int, length: int = 128, rounds: int = 7) -> float:
        """The best time of a forward pass with logits, [num_rows, width] over rows of `length` cells."""
        from outrider.cache.placement import Placement
        from outrider.models.trunk import TrunkCache

        trunk = self.loaded.trunk
        cache = TrunkCache(trunk.layout)
        for kv in cache.buffers():
            kv.resize(num_rows, 512)
        tokens = mx.ones((num_rows, width), mx.int32)
        best = float("inf")
        for _ in range(rounds):
            started = time.perf_counter()
            starts, fed = mx.full((num_rows,), length), mx.full((num_rows,), width)
            place = Placement(list(range(num_rows)), starts, fed, width, length + width, 512, launches=True)
            mx.eval(mx.argmax(trunk.logits(trunk.hidden(tokens, cache, place)), axis=-1))
            best = min(best, time.perf_counter() - started)
        return best * 1000


def ratios(first: Callable[[], DecodeRun], second: Callable[[], DecodeRun], rounds: int) -> list[float]:
    """tokens/s of `first` over tokens/s of `second`. They take turns, and the order changes every round."""
    found = []
    for i in range(rounds):
        if i % 2:
            b, a = second(), first()
        else:
            a, b = first(), second()
        found.append(a.tokens_per_s / b.tokens_per_s)
    return found


def spread(values: Sequence[float]) -> str:
    found = Spread.of(values)
    assert found is not None
    return found.text(2)
