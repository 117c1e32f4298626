"""Adapters for all requests: fused where weights are not quantised, exact terms where they are."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from adapter_files import linear_keys, write_adapter
from outrider.models.adapters.files import AdapterError, read_adapter
from outrider.models.adapters.fuse import fuse
from ragged_rows import error, solo_logits
from tiny_models import quantized_tiny_model, tiny_model

TEXT = [3, 1, 4, 15, 92, 65, 35, 89]


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("keys", ["all", "lm_head", "model.embed_tokens"])
def test_a_fused_model_gives_what_mlx_lm_gives(kind: str, keys: str, tmp_path: Path) -> None:
    family = "llama" if keys == "lm_head" else "qwen2"  # which has biases, and no output layer of its own
    adapted, model = tiny_model(family), tiny_model(family)
    files = read_adapter(
        write_adapter(tmp_path, adapted, kind=kind, keys=linear_keys(model) if keys == "all" else [keys])
    )
    before = solo_logits(model, TEXT)
    assert fuse(files, model) == {}
    assert error(solo_logits(model, TEXT), solo_logits(adapted, TEXT)) < 1e-5
    assert error(solo_logits(model, TEXT), before) > 0.01


def test_experts_are_fused(tmp_path: Path) -> None:
    adapted, model = tiny_model("qwen3_moe"), tiny_model("qwen3_moe")
    keys = ["mlp.switch_mlp.up_proj", "mlp.switch_mlp.down_proj", "self_attn.q_proj"]
    files = read_adapter(write_adapter(tmp_path, adapted, keys=keys))
    assert fuse(files, model) == {}
    assert error(solo_logits(model, TEXT), solo_logits(adapted, TEXT)) < 1e-5


def test_quantised_weights_are_left_alone_and_their_terms_returned(tmp_path: Path) -> None:
    model, _ = quantized_tiny_model("llama-4bit", only="q_proj")
    adapted, _ = quantized_tiny_model("llama-4bit", only="q_proj")
    files = read_adapter(write_adapter(tmp_path, adapted, keys=["self_attn.q_proj", "self_attn.k_proj"]))
    weight = mx.array(model.layers[0].self_attn.q_proj.weight)
    key = mx.array(model.layers[0].self_attn.k_proj.weight)
    terms = fuse(files, model)
    assert sorted(terms) == [f"model.layers.{i}.self_attn.q_proj" for i in range(3)]
    assert mx.array_equal(model.layers[0].self_attn.q_proj.weight, weight)
    assert not mx.array_equal(model.layers[0].self_attn.k_proj.weight, key)


def test_a_refused_adapter_changes_no_weight(tmp_path: Path) -> None:
    """Its last layer is the one that does not fit."""
    model, _ = quantized_tiny_model("llama-4bit", only="embed_tokens")
    adapted, _ = quantized_tiny_model("llama-4bit", only="embed_tokens")
    keys = ["self_attn.q_proj", "model.embed_tokens"]
    files = read_adapter(write_adapter(tmp_path, adapted, keys=keys))
    before = {name: mx.array(part.weight) for name, part in _linears(model)}
    with pytest.raises(AdapterError, match="embed_tokens"):
        fuse(files, model)
    assert all(mx.array_equal(part.weight, before[name]) for name, part in _linears(model))


def _linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear)]
