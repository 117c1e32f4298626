"""Loads a pooling model from a folder: an encoder, or a causal model for embeddings or rerank scores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.models.encoders.causal_model import load_causal
from outrider.models.encoders.encoder_model import load_encoder
from outrider.models.encoders.families import is_encoder
from outrider.models.encoders.pooling_files import PoolingSpec, pooling_kind, pooling_spec, read_json
from outrider.models.encoders.rerank_prompts import pair_prompt
from outrider.models.encoders.yes_no_reranker import load_yes_no_reranker
from outrider.models.errors import ModelUnavailable
from outrider.pooling import PairPrompt, PoolingKind, PoolingModel

SCORE = PoolingSpec("cls", is_normalised=False)  # rerankers read the first token, and have no pooling files


def kind_in(folder: Path) -> PoolingKind | None:
    """What the model in a folder is made for; None: for generating text, or the folder cannot be read."""
    try:
        config = read_json(folder / "config.json")
    except ModelUnavailable:  # the loader of text models says what is wrong
        return None
    return pooling_kind(folder, config) if isinstance(config, dict) else None


def prompt_in(folder: Path) -> PairPrompt | None:
    """The prompt in which the model in a folder reads pairs; None: it reads them with special tokens."""
    config = read_json(folder / "config.json")
    return pair_prompt(folder, config) if isinstance(config, dict) else None


def load_pooling_model(
    folder: Path,
    name: str,
    dtype: str = "auto",
    max_tokens: int | None = None,
    check_wanted: Callable[[], None] = lambda: None,
    cache_bytes: int | None = None,
) -> PoolingModel:
    """Call this on the thread that will run the model. Raises ModelUnavailable with the reason.

    `max_tokens`: the operator's limit of an input. `check_wanted`: called while the weights are read.
    `cache_bytes`: memory for the cells of a causal model's pass; None: a part of what is free.
    """
    config: dict[str, Any] = read_json(folder / "config.json")
    kind = pooling_kind(folder, config)
    if kind is None:
        raise ModelUnavailable(
            f"{folder} is no embedding model: it has no modules.json (sentence-transformers), and "
            f"{config.get('model_type')!r} models generate text."
        )
    if pair_prompt(folder, config) is not None:
        return load_yes_no_reranker(folder, name, dtype, max_tokens, check_wanted, cache_bytes)
    if kind == "reranker":
        if not is_encoder(config):
            raise ModelUnavailable(
                f"{folder}: {config.get('model_type')!r} models with a classification head cannot be used. "
                "Encoders with one can, and Qwen3-Reranker as its publisher has it."
            )
        return load_encoder(folder, config, kind, SCORE.limited(max_tokens), name, dtype)
    spec = pooling_spec(folder).limited(max_tokens)
    if is_encoder(config):
        return load_encoder(folder, config, kind, spec, name, dtype)
    return load_causal(folder, spec, name, dtype, check_wanted, cache_bytes)
