"""Builds a running pooling model from a folder: engine, tokenizer and service."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from outrider.embed.engine import DeviceTurn, EmbeddingEngine
from outrider.embed.service import EmbeddingService
from outrider.embed.tokenizer import EmbeddingTokenizer, load_tokenizer
from outrider.models import machine
from outrider.models.encoders.loading import load_pooling_model, prompt_in
from outrider.pooling import PoolingModel


@dataclass(frozen=True)
class Embedder:
    """A running pooling model: an embedding model or a reranker."""

    engine: EmbeddingEngine
    tokenizer: EmbeddingTokenizer
    service: EmbeddingService

    def close(self) -> None:
        self.service.close()
        self.engine.close()


def build_embedder(
    folder: Path,
    name: str,
    dtype: str = "auto",
    max_tokens: int | None = None,
    turn: DeviceTurn = nullcontext,
    is_outlived: bool = False,
    check_wanted: Callable[[], None] = lambda: None,
    cache_bytes: int | None = None,
) -> Embedder:
    """Load the pooling model in a folder. Raises ModelUnavailable.

    `max_tokens`: the operator's limit of an input. `turn`: within one the engine computes one part of a pass.
    `is_outlived`: the process goes on after the engine. `check_wanted`: called between parts of the load.
    `cache_bytes`: memory for the cells of a causal model's pass; None: a part of what is free.
    """
    tokenizer = load_tokenizer(folder, prompt_in(folder))

    def build() -> PoolingModel:
        machine.settle()
        return load_pooling_model(folder, name, dtype, max_tokens, check_wanted, cache_bytes)

    engine = EmbeddingEngine(build, turn, is_outlived)
    return Embedder(engine, tokenizer, EmbeddingService(engine, tokenizer))
