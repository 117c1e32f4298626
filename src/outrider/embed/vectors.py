"""From a model's pooled vector to what a client gets: fewer dimensions, normalisation, similarities."""

from __future__ import annotations

import base64

import numpy as np

from outrider.pooling import PoolingFacts, Vector

MIN_NORM = 1e-12  # as in sentence-transformers: a vector of zeros stays one


def embedding(vector: Vector, facts: PoolingFacts, dimensions: int | None = None) -> Vector:
    """The first `dimensions` values, normalised again if the model's embeddings are."""
    shortened = vector if dimensions is None else vector[:dimensions]
    return normalised(shortened) if facts.is_normalised else shortened


def normalised(vector: Vector) -> Vector:
    return vector / np.float32(max(float(np.linalg.norm(vector.astype(np.float64))), MIN_NORM))


def cosine(one: Vector, other: Vector) -> float:
    return float(normalised(one).astype(np.float64) @ normalised(other).astype(np.float64))


def sigmoid(score: float) -> float:
    """From a reranker's score to a number from 0 to 1."""
    return float(1 / (1 + np.exp(-np.float64(score)))) if score > -700 else 0.0


def as_base64(vector: Vector) -> str:
    """Little-endian float32, as OpenAI's clients decode it."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
