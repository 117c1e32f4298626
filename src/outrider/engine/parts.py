"""The parts of an engine: the runner and the facts of a model, and the observer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from outrider.cache.disk_tier import DiskTier
from outrider.engine.adapters import AdapterStore, NoAdapters
from outrider.engine.memory_plan import MemoryPlan
from outrider.engine.sequence import OutputText
from outrider.engine.validation import ModelFacts
from outrider.grammar.compiler import GrammarCompiler
from outrider.media.image_reader import ImageReader
from outrider.plan import StepPlan, StepResult, StepRunner
from outrider.request import Request
from outrider.speculate.controller import DepthController


def _no_tokenizer(token_id: int) -> str:
    raise RuntimeError("a thinking budget needs the texts of tokens, and this engine has no tokenizer")


@dataclass(frozen=True)
class EngineParts:
    """The parts that depend on the model. Built on the engine thread, the only thread that uses MLX."""

    runner: StepRunner
    facts: ModelFacts
    budget_bytes: int
    new_text: Callable[[Request], OutputText]
    grammars: GrammarCompiler
    controller: DepthController = field(default_factory=DepthController)
    on_close: Callable[[bool], None] = lambda has_failed: None  # called once, at the end
    prefix_bytes: int = 0  # budget of cached prefixes; 0: no prefix cache
    disk: DiskTier | None = None  # where cached prefixes outlive the process
    reader: ImageReader | None = None  # of a model that reads images; for any thread
    max_rows: int | None = (
        None  # if the configuration does not tell; None: as many as the scheduler's default
    )
    memory: MemoryPlan | None = None  # what each part may take; None: not planned
    held_bytes: Callable[[], Mapping[str, int]] = dict  # memory that the device's library holds, by kind
    release_buffers: Callable[[], None] = lambda: None  # gives back memory that is kept for the next steps
    overlaps_steps: bool = False  # whether a step is launched before the one in front of it is read
    token_text: Callable[[int], str] = _no_tokenizer  # of one token, special tokens included
    adapters: AdapterStore = field(default_factory=NoAdapters)


class EngineObserver(Protocol):
    """Called after every step and every encoded image piece, on the engine thread: it must be quick."""

    def on_step(
        self, plan: StepPlan, result: StepResult, seconds: float, num_waiting: int, cache_bytes: int
    ) -> None: ...

    def on_encode(self, seconds: float) -> None: ...

    def on_embedding_cache(self, num_hits: int, num_bytes: int) -> None: ...  # if the model reads images
