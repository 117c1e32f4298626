"""What the engine is made of: what a model brings to it, and who watches it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from outrider.cache.disk_tier import DiskTier
from outrider.config import CacheGeometry
from outrider.engine.image_encoding import ImageEmbeddings
from outrider.engine.in_flight import Launches
from outrider.engine.sequence import OutputText
from outrider.engine.validation import ModelFacts
from outrider.grammar.compiler import GrammarCompiler
from outrider.media.image_reader import PictureReader
from outrider.plan import StepPlan, StepResult
from outrider.prompt_media import MediaPiece
from outrider.request import Request
from outrider.speculate.controller import DepthController


class StepRunner(Launches, Protocol):
    """What the engine needs of a runner."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def prefix_bytes(self) -> int: ...

    def geometry(self, capacity_step: int) -> CacheGeometry: ...

    @property
    def image_embeddings(self) -> ImageEmbeddings | None: ...  # of a model that sees

    def encode(self, piece: MediaPiece) -> None: ...

    def reset(self) -> None: ...

    def forget_prefixes(self) -> None: ...


@dataclass(frozen=True)
class EngineParts:
    """What a model brings to the engine; built on the engine thread, since MLX stays there."""

    runner: StepRunner
    facts: ModelFacts
    budget_bytes: int
    new_text: Callable[[Request], OutputText]
    grammars: GrammarCompiler
    controller: DepthController = field(default_factory=DepthController)
    keep_learnt: Callable[[], None] = lambda: None  # called once, at the end
    prefix_bytes: int = 0  # for cached prefixes; 0: none are cached
    disk: DiskTier | None = None  # where they outlive the process
    reader: PictureReader | None = None  # of a model that sees; for any thread
    overlaps_steps: bool = False  # whether a step is launched before the one in front of it is read


class EngineObserver(Protocol):
    """Told of every step and of every piece of a picture, on the engine thread: it must be quick."""

    def on_step(
        self, plan: StepPlan, result: StepResult, seconds: float, num_waiting: int, cache_bytes: int
    ) -> None: ...

    def on_encode(self, seconds: float) -> None: ...

    def on_embedding_cache(
        self, num_hits: int, num_bytes: int
    ) -> None: ...  # after each of both, if the model sees
