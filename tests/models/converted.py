"""Runs a converted model folder with all weights dequantised to float32, for comparisons."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model, load_config, load_model

from outrider.models.dtypes import settle_dtype
from outrider.models.groups_of_16 import CONFIG_KEY
from outrider.models.loader import trunk_on_disk


def load(folder: Path) -> nn.Module:
    if CONFIG_KEY in load_config(folder):  # which mlx-lm does not know
        model = trunk_on_disk(folder).model
        settle_dtype(model, "float32")
        return model
    model, config = load_model(folder)
    model.update(tree_map(_as_float32, model.parameters()))
    if "quantization" in config:
        dequantize_model(model)
    mx.eval(model.parameters())
    return model


def logits(model: nn.Module, ids: list[int]) -> np.ndarray:
    """`[len(ids), vocabulary]`"""
    return np.array(model(mx.array([ids]))[0])


def continue_greedily(model: nn.Module, ids: list[int], num_tokens: int) -> list[int]:
    cache = make_prompt_cache(model)
    fed, made = ids, []
    for _ in range(num_tokens):
        made.append(int(model(mx.array([fed]), cache=cache)[0, -1].argmax()))
        fed = made[-1:]
    return made


def _as_float32(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array
