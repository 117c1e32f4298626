"""Fuses an adapter into the weights of a model, for all requests.

Only weights that are not quantised: there the fused model costs what the plain one does. Quantised weights
would have to be dequantised and quantised again, as mlx-lm does it, which rounds them a second time. Their
terms are returned instead, and every row computes with them, exactly.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from outrider.models.adapters.files import AdapterFiles
from outrider.models.adapters.fit import (
    EMBEDDING,
    LINEAR,
    SWITCH,
    AdaptedLayer,
    LayerTerms,
    adapted_layers,
    check_shapes,
    linear_terms,
    linear_weights,
    refusal,
)

QUANTIZED = "Adapters of quantised experts and embeddings are not served: fuse it with mlx_lm.fuse."


def fuse(files: AdapterFiles, model: nn.Module) -> dict[str, LayerTerms]:
    """Returns the terms of the quantised linear layers, by path. Raises AdapterError; then nothing is fused.

    Call it before the model is prepared for serving.
    """
    weights: list[tuple[nn.Module, mx.array]] = []
    terms: dict[str, LayerTerms] = {}
    for layer in adapted_layers(files, model):
        if isinstance(layer.module, LINEAR):
            own = linear_terms(files, layer)
            if isinstance(layer.module, nn.QuantizedLinear):
                terms[layer.path] = own
                continue
            fused = _fused_linear(layer.module, own)
        else:
            fused = _fused_table(files, layer)
        fused = fused.astype(layer.module["weight"].dtype)
        mx.eval(fused)
        weights.append((layer.module, fused))
    for module, fused in weights:
        module.weight = fused
    return terms


def _fused_linear(module: nn.Module, terms: LayerTerms) -> mx.array:
    weight = linear_weights(module)
    if terms.gain is not None:
        weight = weight * terms.gain[:, None]
    return weight + terms.b.T @ terms.a


def _fused_table(files: AdapterFiles, layer: AdaptedLayer) -> mx.array:
    """The weights of an embedding, or of experts' linear layers."""
    module, rank = layer.module, files.rank
    if not isinstance(module, EMBEDDING + SWITCH):
        raise refusal(files, layer, "Outrider knows adapters of linear layers, embeddings and experts only.")
    if hasattr(module, "bits"):
        raise refusal(files, layer, QUANTIZED)
    weight = module["weight"].astype(mx.float32)
    if isinstance(module, SWITCH):
        num_experts, num_outputs, num_inputs = weight.shape
        wanted = {"lora_a": (num_experts, rank, num_inputs), "lora_b": (num_experts, num_outputs, rank)}
        if layer.m is not None:
            raise refusal(files, layer, "There is no DoRA of experts.")
        check_shapes(files, layer, wanted)
        return weight + files.scale * layer.lora_b @ layer.lora_a
    num, dims = weight.shape
    check_shapes(files, layer, {"lora_a": (num, rank), "lora_b": (rank, dims), "m": (num,)})
    weight = weight + files.scale * layer.lora_a @ layer.lora_b
    if layer.m is not None:
        weight = weight * (layer.m / mx.linalg.norm(weight, axis=1))[:, None]
    return weight
