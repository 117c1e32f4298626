"""Pooling models turn a text into one vector: embedding models and rerankers. Pure data and a protocol.

What passes between a loaded model (models/encoders), the engine that runs it (embed) and the routes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
PoolingKind = Literal["embedding", "reranker"]


@dataclass(frozen=True)
class TokenInput:
    """One text, or one pair of texts, as the model reads it."""

    ids: tuple[int, ...]
    type_ids: tuple[int, ...] = ()  # 1 for tokens of the second text of a pair; empty: all 0

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class PairPrompt:
    """The prompt in which a causal reranker reads a query and a document.

    before | before_query QUERY before_document DOCUMENT | after      the three parts are tokenized apart
    """

    before: str
    before_query: str
    before_document: str
    after: str


@dataclass(frozen=True)
class PoolingFacts:
    """Facts about a loaded model, for threads that do not use the model."""

    name: str
    kind: PoolingKind
    dimensions: int  # of an embedding; 1 for a reranker
    max_tokens: int  # of one input, special tokens included
    vocab_size: int
    pooling: str  # how token states become one vector: "mean", "cls", "lasttoken", ...
    is_normalised: bool  # True: embeddings have the length 1
    pass_tokens: int  # most tokens of one pass, unless a single input has more
    dtype: str = ""
    device: str = ""


class PoolingModel(Protocol):
    """A loaded model. Only the thread that has loaded it may call it."""

    @property
    def facts(self) -> PoolingFacts: ...

    def run(self, inputs: Sequence[TokenInput]) -> Generator[None, None, list[Vector]]:
        """One pass. Each `next` computes a small part of it; the result is one vector for each input.

        Embeddings are as the pooling leaves them: `embed.vectors` normalises them. A reranker's vector is its
        score.
        """
        ...
