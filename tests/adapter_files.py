"""Adapters of random numbers, in folders as mlx-lm writes them."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers

LEAVES = ("lora_a", "lora_b", "m")


def linear_keys(model: nn.Module) -> list[str]:
    """The paths of the linear layers inside the layers of a model."""
    kinds = (nn.Linear, nn.QuantizedLinear)
    found = (
        name for layer in model.layers for name, part in layer.named_modules() if isinstance(part, kinds)
    )
    return sorted(set(found))


def write_adapter(
    folder: Path,
    model: nn.Module,
    *,
    kind: str = "lora",
    rank: int = 4,
    scale: float = 2.0,
    keys: Sequence[str] | None = None,
    num_layers: int = -1,
    seed: str = "",
) -> Path:
    """Put mlx-lm's own adapter layers into the model, fill them, and write their parameters.

    The model is then what mlx-lm computes with the adapter. `keys`: None: all linear layers.
    """
    keys = linear_keys(model) if keys is None else list(keys)
    parameters = {"rank": rank, "scale": scale, "dropout": 0.1, "keys": keys}
    mx.random.seed(0)
    linear_to_lora_layers(model, num_layers, parameters, use_dora=kind == "dora")
    arrays = {
        name: _filled(name, array, f"{seed}{name}")
        for name, array in tree_flatten(model.parameters())
        if name.rpartition(".")[2] in LEAVES
    }
    model.update(tree_unflatten(list(arrays.items())))
    model.eval()
    config = {"fine_tune_type": kind, "num_layers": num_layers, "lora_parameters": parameters}
    save_adapter(folder, config, arrays)
    return folder


def _filled(name: str, array: mx.array, seed: str) -> mx.array:
    noise = mx.random.normal(array.shape, key=mx.random.key(zlib.crc32(seed.encode())))
    if name.endswith(".m"):  # learnt from the norms of the weights on
        return array * (1 + 0.2 * noise)
    return noise / math.sqrt(array.shape[0]) * (0.7 if name.endswith("lora_b") else 1)


def save_adapter(folder: Path, config: dict[str, Any], arrays: dict[str, mx.array]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "adapters.safetensors"), arrays)
