"""Fused layers of a model that is divided among ranks: what each rank computes before the sum."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from absent_ranks import AbsentRanks
from outrider.cache.placement import Placement
from outrider.cache.ragged_kv import LayerView
from outrider.cpu import fused_layers
from outrider.cpu.extension import extension
from outrider.cpu.quantized import keep_quantized
from outrider.models.layer_swaps import without_speed_swaps
from outrider.models.sharding import shard
from outrider.models.trunk import Trunk, TrunkCache
from outrider.rank_sums import SummedLinear, sum_output, without_sums
from ragged_rows import error
from tiny_models import tiny_model

pytestmark = [
    pytest.mark.skipif(extension() is None, reason="no native extension: no compiler, or not Linux"),
    pytest.mark.usefixtures("as_before"),
]

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", {}),
    "qwen3 with experts": ("qwen3_moe", {"moe_intermediate_size": 128}),
}


def served(kind: str, rank: int = 0, num_ranks: int = 1) -> Trunk:
    """The whole model, or a rank's part of it."""
    family, changes = KINDS[kind]
    model = tiny_model(family, **SIZES, **changes)
    nn.quantize(model, group_size=32, bits=4)
    if num_ranks > 1:
        shard(model, AbsentRanks(rank, num_ranks), family)  # type: ignore[arg-type]
        for layer in model.layers:
            if getattr(layer.mlp, "sharding_group", None) is not None:
                sum_output(layer.mlp)
    assert keep_quantized(model) == []
    with without_sums(model):
        trunk = Trunk(model, max_context=64)
    trunk.prepare_for_serving()  # compares fused with plain layers: on this rank alone
    return trunk


def is_fused(layer: nn.Module) -> bool:
    return fused_layers.plain_class(type(layer)) is not type(layer)


def attended(trunk: Trunk, x: mx.array, num_fed: list[int]) -> mx.array:
    """The first layer's attention over rows without a past, and the residual."""
    layer, kv = trunk.model.layers[0], next(TrunkCache(trunk.layout).buffers())
    rows, width, _ = x.shape
    kv.resize(rows, 16)
    starts = mx.zeros(rows, mx.int32)
    place = Placement(list(range(rows)), starts, mx.array(num_fed), width, width, 16)
    with without_sums(layer):
        if is_fused(layer):
            return layer._fused.attend(layer, x, LayerView(kv, place), 0)
        attention = layer.self_attn(layer.input_layernorm(x), place.mask(None), LayerView(kv, place))
        return x + attention


@pytest.mark.parametrize("kind", KINDS)
def test_the_layers_of_every_rank_are_fused(kind: str) -> None:
    for rank in range(2):
        layers = served(kind, rank, 2).model.layers
        assert all(is_fused(layer) for layer in layers)
        assert layers[0]._fused.mlp is not None  # of a mixture of experts, the first layer has none
        assert type(layers[0].self_attn.o_proj) is SummedLinear


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_of_all_ranks_add_up_to_the_layer_of_one(kind: str) -> None:
    whole, parts = served(kind), [served(kind, rank, 2) for rank in range(2)]
    x, num_fed = mx.random.normal((2, 3, whole.hidden_size)), [3, 3]
    o = whole.model.layers[0].self_attn.o_proj
    shift = o.bias if "bias" in o else mx.zeros(1)  # in the part of each rank, and once in the sum
    found = sum(attended(part, x, num_fed) - x - shift for part in parts) + shift
    expected = attended(whole, x, num_fed) - x
    assert error(np.array(found), np.array(expected)) <= 0.002
    fed = mx.array(num_fed)
    out = sum(part.model.layers[0]._fused.mlp(x, fed) for part in parts)
    total = x + without_sum(parts[0].model.layers[0].mlp.down_proj, out)
    assert error(np.array(total), np.array(whole.model.layers[0]._fused.mlp(x, fed))) <= 0.002


def without_sum(linear: SummedLinear, total: mx.array) -> mx.array:
    with without_sums(linear):
        return linear.total(total)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_gives_what_its_plain_layers_give(kind: str) -> None:
    trunk = served(kind, 1, 2)
    x = mx.random.normal((2, 5, trunk.hidden_size))
    found = attended(trunk, x, [5, 5])
    with without_speed_swaps(trunk.model):
        expected = attended(trunk, x, [5, 5])
    assert error(np.array(found - x), np.array(expected - x)) <= 0.002


def test_a_part_is_the_same_whatever_is_beside_it() -> None:
    trunk = served("llama", 1, 2)
    x = mx.random.normal((4, 6, trunk.hidden_size))
    mlp = trunk.model.layers[0]._fused.mlp
    together, parts = attended(trunk, x, [6, 2, 1, 5]), mlp(x, mx.array([6, 2, 1, 5]))
    for row, fed in enumerate((6, 2, 1, 5)):
        alone = x[row : row + 1, :fed]
        assert mx.array_equal(together[row, :fed], attended(trunk, alone, [fed])[0])
        assert mx.array_equal(parts[row, :fed], mlp(alone, mx.array([fed]))[0])


def test_the_part_of_padding_is_nothing() -> None:
    trunk = served("llama", 0, 2)
    x = mx.random.normal((2, 3, trunk.hidden_size))
    assert mx.array_equal(attended(trunk, x, [3, 1])[1, 1:], x[1, 1:])
    parts = trunk.model.layers[0]._fused.mlp(x, mx.array([3, 1]))
    assert not mx.any(parts[1, 1:])
    assert mx.all(parts[0])


def test_a_layer_that_talks_to_other_ranks_in_its_own_way_stays_as_it_is() -> None:
    """Its sum may be anywhere, also in the middle of a primitive."""
    model = tiny_model("llama", **SIZES)
    nn.quantize(model, group_size=32, bits=4)
    assert keep_quantized(model) == []
    model.layers[1].mlp.sharding_group = mx.distributed.init()  # a group of one
    trunk = Trunk(model, max_context=64)
    trunk.prepare_for_serving()
    assert [is_fused(layer) for layer in model.layers[:2]] == [True, False]
