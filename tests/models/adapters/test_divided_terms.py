"""The terms of adapters for the layers of a model that is divided among ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from absent_ranks import AbsentRanks
from adapter_files import write_adapter
from outrider.models.adapters.files import AdapterError, AdapterFiles, read_adapter
from outrider.models.adapters.fit import LayerTerms, adapted_layers, linear_terms
from outrider.models.sharding import shard
from tiny_models import tiny_model

SIZES: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
ATTENTION = "model.layers.0.self_attn."


def terms_of(files: AdapterFiles, model: nn.Module) -> dict[str, LayerTerms]:
    return {layer.path: linear_terms(files, layer) for layer in adapted_layers(files, model)}


def divided(family: str, rank: int, **changes: Any) -> nn.Module:
    model = tiny_model(family, **SIZES | changes)
    shard(model, AbsentRanks(rank, 2), family)  # type: ignore[arg-type]
    return model


def output(terms: LayerTerms, x: mx.array) -> mx.array:
    return (x @ terms.a.T) @ terms.b


def test_outputs_are_put_together_and_inputs_are_summed(tmp_path: Path) -> None:
    keys = ["self_attn.q_proj", "self_attn.o_proj"]
    files = read_adapter(write_adapter(tmp_path, tiny_model("llama", **SIZES), keys=keys))
    whole, *parts = (terms_of(files, each) for each in (tiny_model("llama", **SIZES), *both_ranks()))
    x = mx.random.normal((5, whole[f"{ATTENTION}q_proj"].a.shape[1]))
    found = mx.concatenate([output(part[f"{ATTENTION}q_proj"], x) for part in parts], axis=-1)
    assert mx.allclose(found, output(whole[f"{ATTENTION}q_proj"], x), atol=1e-5)
    x = mx.random.normal((5, 128))
    halves = mx.split(x, 2, axis=-1)
    sums = sum(output(part[f"{ATTENTION}o_proj.linear"], h) for part, h in zip(parts, halves, strict=True))
    assert mx.allclose(sums, output(whole[f"{ATTENTION}o_proj"], x), atol=1e-5)


def both_ranks() -> list[nn.Module]:
    return [divided("llama", rank) for rank in range(2)]


def test_gains_are_those_of_the_own_outputs(tmp_path: Path) -> None:
    keys = ["self_attn.v_proj"]
    files = read_adapter(write_adapter(tmp_path, tiny_model("llama", **SIZES), kind="dora", keys=keys))
    path = f"{ATTENTION}v_proj"
    whole, *parts = (
        terms_of(files, each)[path].gain for each in (tiny_model("llama", **SIZES), *both_ranks())
    )
    assert mx.allclose(mx.concatenate(parts), whole, atol=1e-6)


@pytest.mark.parametrize(
    ("key", "num_kv_heads"),
    [("linear_attn.in_proj_qkv", 2), ("self_attn.k_proj", 1)],
    ids=["segments", "one head for two ranks"],
)
def test_a_layer_that_is_divided_otherwise_is_refused(tmp_path: Path, key: str, num_kv_heads: int) -> None:
    changes = {"num_key_value_heads": num_kv_heads}
    whole, model = tiny_model("qwen3_5", **SIZES | changes), divided("qwen3_5", 1, **changes)
    with pytest.raises(AdapterError, match="use one rank"):
        terms_of(read_adapter(write_adapter(tmp_path, whole, keys=[key])), model)


def test_an_adapter_of_another_model_is_refused_with_the_shape_of_the_whole_layer(tmp_path: Path) -> None:
    larger = tiny_model("llama", **SIZES | {"num_attention_heads": 8})
    files = read_adapter(write_adapter(tmp_path, larger, keys=["self_attn.q_proj"]))
    with pytest.raises(AdapterError, match=r"needs \(4, 128\)"):
        terms_of(files, divided("llama", 0))
