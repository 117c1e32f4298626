"""A rank's part of a model gets the layers that the whole model gets (models/layer_swaps.py)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from outrider.models import machine, merged_linear
from outrider.models.dtypes import settle_dtype
from outrider.models.sharding import shard
from outrider.models.trunk import Trunk
from outrider.rank_sums import SummedLinear
from tiny_models import is_quantized_name, quantized_tiny_model, tiny_model

SIZES: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def served(name: str, is_divided: bool) -> nn.Module:
    """Divided among one rank: the layers' classes are those of several."""
    model = quantized_tiny_model(name, **SIZES)[0] if is_quantized_name(name) else tiny_model(name, **SIZES)
    if is_divided:
        shard(model, mx.distributed.init(), name.partition("-")[0])
    settle_dtype(model, "auto")
    trunk = Trunk(model, max_context=64)
    trunk.prepare_for_serving()
    return trunk.model


def kinds(model: nn.Module) -> dict[str, tuple[str, list[str]]]:
    """The class of each layer and those that its class was made from, by path. Sums over ranks left out."""
    found = {}
    for path, layer in model.named_modules():
        if type(layer) is not SummedLinear:
            made_from = [kind.__name__ for kind in type(layer).__mro__ if kind.__name__ != "_SummedOutput"]
            found[path.replace("_proj.linear", "_proj")] = type(layer).__name__, sorted({*made_from})
    return found


@pytest.mark.parametrize("name", ["llama", "llama-4bit", "qwen3_moe", "qwen3_moe-4bit", "qwen3_5-4bit"])
def test_a_part_has_the_layers_of_the_whole(name: str) -> None:
    whole, part = served(name, is_divided=False), served(name, is_divided=True)
    assert any(type(layer) is SummedLinear for _, layer in part.named_modules())
    assert kinds(part) == kinds(whole)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_where_the_device_outruns_the_host_parts_are_merged(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "outruns_host", lambda: True)
    whole, part = served(name, is_divided=False), served(name, is_divided=True)
    merged = [path for path, (kind, _) in kinds(part).items() if kind == "MergedLinearPart"]
    assert len(merged) > 4 * len(part.layers)
    assert kinds(part) == kinds(whole)
    assert merged_linear.plain_class(type(part.layers[0].mlp.gate_proj)) is nn.Linear
