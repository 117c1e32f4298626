"""An engine on a runner without a model: its steps can be held up, and its resets made to raise."""

from __future__ import annotations

import threading
import time
from typing import Any

from fake_runner import VOCAB_SIZE, FakeLaunched, FakeRunner
from scheduler_harness import FakeText

from outrider.engine.engine import Engine
from outrider.engine.loop import Outbox
from outrider.engine.parts import EngineParts
from outrider.engine.sequence import Delta
from outrider.engine.validation import ModelFacts
from outrider.grammar.compiler import GrammarCompiler
from outrider.plan import CacheGeometry, StepPlan, StepResult
from outrider.request import SamplingParams
from patience import PATIENCE_S

WAIT_S = PATIENCE_S
GEOMETRY = CacheGeometry(bytes_per_cell=1, capacity_step=16)
SHORT = SamplingParams(max_tokens=4, temperature=0)
ENDLESS = SamplingParams(max_tokens=None, temperature=0)


class EngineRunner(FakeRunner):
    """The fake runner as an engine sees it; steps can be held up and resets made to raise."""

    def __init__(self) -> None:
        super().__init__(GEOMETRY)
        self.may_run = threading.Event()
        self.may_run.set()
        self.breaks_on_reset = False
        self.num_under_way = 0

    def geometry(self, capacity_step: int) -> CacheGeometry:
        return GEOMETRY

    def launch(self, plan: StepPlan, after: FakeLaunched | None = None) -> FakeLaunched:
        self.num_under_way += 1
        return super().launch(plan, after)

    def finish(self, launched: FakeLaunched) -> StepResult:
        assert self.may_run.wait(WAIT_S)
        self.num_under_way -= 1
        time.sleep(0.001)
        return super().finish(launched)

    def reset(self) -> None:
        if self.breaks_on_reset:
            raise RuntimeError("the device is gone")
        super().reset()


def no_tokenizer() -> Any:
    raise AssertionError("no grammar is asked for")


def parts(runner: EngineRunner, budget_bytes: int = 10**9, overlaps_steps: bool = False) -> EngineParts:
    facts = ModelFacts("fake", VOCAB_SIZE, 100_000, frozenset(), "none")
    return EngineParts(
        runner,
        facts,
        budget_bytes,
        lambda request: FakeText(),
        GrammarCompiler(no_tokenizer),
        overlaps_steps=overlaps_steps,
    )


def submit(engine: Engine, prompt_ids: list[int], params: SamplingParams) -> Outbox:
    return engine.submit(engine.validate(prompt_ids, params))


def end_of(outbox: Outbox) -> Delta:
    """All that came, up to the end."""
    whole = outbox.take(WAIT_S)
    assert whole is not None, "no end came"
    while whole.finish_reason is None:
        more = outbox.take(WAIT_S)
        assert more is not None, "no end came"
        whole = whole.merged(more)
    return whole
