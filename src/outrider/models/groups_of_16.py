"""Weights in groups of 16: those of the GGUF types Q2_K, Q3_K and Q6_K. MLX has no such quantised format.

On CPUs with the native extension they stay quantised (cpu/quantized.py). Elsewhere they become float16 when
the model is loaded. Tensors of a model folder, which models/gguf/convert.py wrote:

    NAME.weight   codes, packed as MLX packs them
    NAME.scales   one for each group of 16 weights: w = scale * code + bias
    NAME.biases   Q2_K only. Without them: w = scale * (code - 2^(bits - 1))

config.json names the layers and their bits under CONFIG_KEY.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from outrider.cpu.quantized import new_embedding, new_linear
from outrider.models.dtypes import dense_weight, keeps_quantized
from outrider.models.machine import is_cpu
from outrider.models.quantization_check import check_groups_of_16

log = logging.getLogger(__name__)

CONFIG_KEY = "groups_of_16"
GROUP_SIZE = 16
PARTS = ("weight", "scales", "biases")


def load_groups_of_16(model: nn.Module, weights: dict[str, mx.array], layers: object) -> dict[str, mx.array]:
    """Prepare the model for its weights in groups of 16, and return the weights that it is to load.

    `model` has no weights yet. `layers` is the entry of config.json. Raises ValueError for a tensor that
    cannot be right.
    """
    modules = dict(model.named_modules())
    bits_of = check_groups_of_16(modules, weights, layers)
    if not (is_cpu() and keeps_quantized("auto")):
        log.warning("%d layers become float16: MLX has no quantised format with groups of 16", len(bits_of))
        return _dequantised(weights, bits_of)
    kept = []
    for name, bits in bits_of.items():
        parts = {part: weights[f"{name}.{part}"] for part in (*PARTS, "bias") if f"{name}.{part}" in weights}
        new = new_embedding if isinstance(modules[name], nn.Embedding) else new_linear
        kept.append((name, new(parts, GROUP_SIZE, bits, "affine")))
    model.update_modules(tree_unflatten(kept))
    return weights


def _dequantised(weights: dict[str, mx.array], bits_of: Mapping[str, int]) -> dict[str, mx.array]:
    found = dict(weights)
    for name, bits in bits_of.items():
        codes, scales = found.pop(f"{name}.weight"), found.pop(f"{name}.scales")
        biases = found.pop(f"{name}.biases", None)
        found[f"{name}.weight"] = dense_weight(codes, scales, biases, GROUP_SIZE, bits, "affine").astype(
            mx.float16
        )
    return found
