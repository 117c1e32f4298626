"""Loads a pooling model from a folder: an encoder, or a causal model that is made for embeddings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.models.encoders.causal_model import load_causal
from outrider.models.encoders.encoder_model import load_encoder
from outrider.models.encoders.families import is_encoder
from outrider.models.encoders.pooling_files import PoolingSpec, pooling_kind, pooling_spec, read_json
from outrider.models.errors import ModelUnavailable
from outrider.pooling import PoolingKind, PoolingModel

SCORE = PoolingSpec("cls", is_normalised=False)  # rerankers read the first token, and have no pooling files


def kind_in(folder: Path) -> PoolingKind | None:
    """What the model in a folder is made for; None: for generating text, or the folder cannot be read."""
    try:
        config = read_json(folder / "config.json")
    except ModelUnavailable:  # the loader of text models says what is wrong
        return None
    return pooling_kind(folder, config) if isinstance(config, dict) else None


def load_pooling_model(
    folder: Path,
    name: str,
    dtype: str = "auto",
    max_tokens: int | None = None,
    check_wanted: Callable[[], None] = lambda: None,
) -> PoolingModel:
    """Call this on the thread that will run the model. Raises ModelUnavailable with the reason.

    `max_tokens`: the operator's limit of an input. `check_wanted`: called while the weights are read.
    """
    config: dict[str, Any] = read_json(folder / "config.json")
    kind = pooling_kind(folder, config)
    if kind is None:
        raise ModelUnavailable(
            f"{folder} is no embedding model: it has no modules.json (sentence-transformers), and "
            f"{config.get('model_type')!r} models generate text."
        )
    if kind == "reranker":
        if not is_encoder(config):
            raise ModelUnavailable(
                f"{folder}: rerankers are supported for encoders only, not for {config.get('model_type')!r}."
            )
        return load_encoder(folder, config, kind, SCORE.limited(max_tokens), name, dtype)
    spec = pooling_spec(folder).limited(max_tokens)
    if is_encoder(config):
        return load_encoder(folder, config, kind, spec, name, dtype)
    return load_causal(folder, spec, name, dtype, check_wanted)
