"""An encoder with BERT's layers in NumPy and float64, one input at a time, from Hugging Face's tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tiny_encoders import Arrays

_erf = np.frompyfunc(math.erf, 1, 1)


def states(
    weights: Arrays,
    names: Sequence[Sequence[str]],
    config: dict[str, Any],
    ids: Sequence[int],
    type_ids: Sequence[int] = (),
) -> np.ndarray:
    """The states of the last layer.  [tokens, hidden]. `names`: of each layer's tensors."""
    eps = config.get("layer_norm_eps", 1e-12)
    num_heads = config.get("num_attention_heads") or config["n_heads"]
    has_offset = config["model_type"] in ("roberta", "xlm-roberta", "mpnet")
    first = 1 + config["pad_token_id"] if has_offset else 0
    bias = _distance_bias(weights, len(ids)) if config["model_type"] == "mpnet" else 0.0
    x = weights["embeddings.word_embeddings.weight"][list(ids)].astype(np.float64)
    x = x + weights["embeddings.position_embeddings.weight"][first : first + len(ids)]
    if "embeddings.token_type_embeddings.weight" in weights:
        x = x + weights["embeddings.token_type_embeddings.weight"][list(type_ids) or [0] * len(ids)]
    x = _norm(weights, "embeddings.LayerNorm", x, eps)
    for query, key, value, attended, norm, expand, contract, last in names:
        q, k, v = (_heads(_linear(weights, name, x), num_heads) for name in (query, key, value))
        scores = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1]) + bias
        probabilities = np.exp(scores - scores.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        mixed = (probabilities @ v).swapaxes(0, 1).reshape(x.shape)
        x = _norm(weights, norm, _linear(weights, attended, mixed) + x, eps)
        wide = _linear(weights, expand, x)
        wide = 0.5 * wide * (1 + _erf(wide / math.sqrt(2)).astype(np.float64))
        x = _norm(weights, last, _linear(weights, contract, wide) + x, eps)
    return x


def pooled(tokens: np.ndarray, mode: str) -> np.ndarray:
    match mode:
        case "cls":
            return tokens[0]
        case "lasttoken":
            return tokens[-1]
        case "max":
            return tokens.max(0)
        case "mean":
            return tokens.mean(0)
        case "mean_sqrt_len_tokens":
            return tokens.sum(0) / math.sqrt(len(tokens))
        case _:
            return np.average(tokens, axis=0, weights=np.arange(1, len(tokens) + 1))


def score(weights: Arrays, head: tuple[str, str], activation: Any, state: np.ndarray) -> float:
    """The score of a reranker, from the state of the first token."""
    hidden = activation(_linear(weights, head[0], state))
    return float(_linear(weights, head[1], hidden)[0])


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def _distance_bias(weights: Arrays, length: int) -> np.ndarray:
    """MPNet's bias of the scores, pair by pair.  [heads, tokens, tokens]"""
    table = weights["encoder.relative_attention_bias.weight"]
    half = len(table) // 2
    found = np.zeros((table.shape[1], length, length))
    for query in range(length):
        for key in range(length):
            distance = abs(key - query)
            if distance < half // 2:
                bucket = distance
            else:
                steps = math.log(distance / (half // 2)) / math.log(128 / (half // 2))
                bucket = min(half - 1, half // 2 + int(steps * (half - half // 2)))
            found[:, query, key] = table[bucket + (half if key > query else 0)]
    return found


def _linear(weights: Arrays, name: str, x: np.ndarray) -> np.ndarray:
    return x @ weights[f"{name}.weight"].T.astype(np.float64) + weights[f"{name}.bias"]


def _norm(weights: Arrays, name: str, x: np.ndarray, eps: float) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _heads(x: np.ndarray, num_heads: int) -> np.ndarray:
    return x.reshape(len(x), num_heads, -1).swapaxes(0, 1)
