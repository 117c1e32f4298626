"""The dequantised weights of a wide pass, counted on the CPU with layers as on CUDA."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from outrider.cache.placement import LAUNCH_EVERY_LAYERS, MAX_LAUNCHED, Placement, most_held
from outrider.models import quantized_layers
from outrider.models.copied_weights import copied_bytes, most_copied_bytes
from outrider.models.draft_model import DraftModel
from outrider.models.heads import LoadedHead, new_head
from outrider.models.merged_linear import merge
from outrider.models.quantized_layers import reported_copies, use_flat_matmuls
from outrider.models.trunk import Trunk, TrunkCache
from outrider.plan import MANY_TOKENS
from tiny_models import tiny_model

# Bytes of bfloat16 copies in the tiny models: hidden states of 64, 4 heads of 16 with 2 for keys, MLPs of 96.
QKV, OUT, MLP = 2 * 64 * (64 + 32 + 32), 2 * 64 * 64, 2 * 3 * 64 * 96
ROUTER = 2 * 64 * 4  # of 4 experts
DENSE_LAYER = QKV + OUT + MLP
HELD_LAYERS = (MAX_LAUNCHED + 1) * LAUNCH_EVERY_LAYERS
MANY_LAYERS = HELD_LAYERS + 5


def flat_trunk(family: str, dtype: mx.Dtype = mx.bfloat16, **changes: Any) -> Trunk:
    model = tiny_model(family, **changes)
    model.set_dtype(dtype)
    nn.quantize(model, group_size=32, bits=4, class_predicate=_is_quantisable)
    trunk = Trunk(model, max_context=256)
    use_flat_matmuls(model)
    return trunk


def _is_quantisable(_: str, layer: nn.Module) -> bool:
    return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 32 == 0


def weight_bytes(*layers: nn.Module) -> int:
    """Of bfloat16 copies of all quantised linear layers among these modules."""
    linear = [m for layer in layers for _, m in layer.named_modules() if isinstance(m, nn.QuantizedLinear)]
    return sum(2 * m["weight"].size * 32 // m.bits for m in linear)


def test_a_wide_pass_holds_the_copies_of_a_few_layers() -> None:
    assert most_copied_bytes(flat_trunk("qwen3", num_hidden_layers=MANY_LAYERS), None) == (
        HELD_LAYERS * DENSE_LAYER
    )
    assert most_copied_bytes(flat_trunk("qwen3", num_hidden_layers=3), None) == 3 * DENSE_LAYER


def test_merged_layers_copy_what_their_parts_would(monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = flat_trunk("qwen3", num_hidden_layers=MANY_LAYERS)
    merge(trunk.model, trunk.dry_run)
    assert most_copied_bytes(trunk, None) == HELD_LAYERS * DENSE_LAYER
    gate_and_up = 2 * MLP // 3
    monkeypatch.setattr(quantized_layers, "MAX_DEQUANTIZED_BYTES", gate_and_up - 1)
    assert most_copied_bytes(trunk, None) == HELD_LAYERS * (DENSE_LAYER - gate_and_up)


def test_experts_are_not_copied_and_their_router_is() -> None:
    trunk = flat_trunk("qwen3_moe", num_hidden_layers=MANY_LAYERS)  # the first layer has an MLP
    expected = [QKV, OUT + MLP + QKV, *[OUT + ROUTER + QKV] * (MANY_LAYERS - 2), OUT + ROUTER]
    assert most_copied_bytes(trunk, None) == most_held(expected)
    # The first launches hold most. Of their last layer they have only what comes before its cells.
    others = (HELD_LAYERS - 1) * QKV + (HELD_LAYERS - 2) * (OUT + ROUTER)
    assert most_held(expected) == QKV + OUT + MLP + others


def test_recurrent_layers_of_a_hybrid_launch_their_copies_too() -> None:
    trunk = flat_trunk("qwen3_5", num_hidden_layers=MANY_LAYERS)
    layers = trunk.inner.layers
    assert len({layer.is_linear for layer in layers}) == 2
    ends = [weight_bytes(_mixer(layer)["out_proj" if layer.is_linear else "o_proj"]) for layer in layers]
    starts = [weight_bytes(_mixer(layer)) - end for layer, end in zip(layers, ends, strict=True)]
    rests = [end + weight_bytes(layer.mlp) for layer, end in zip(layers, ends, strict=True)]
    between = [rest + start for rest, start in zip(rests, starts[1:], strict=False)]
    found = most_copied_bytes(trunk, None)
    assert found == most_held([starts[0], *between, rests[-1]])
    assert found < weight_bytes(*layers)


def _mixer(layer: nn.Module) -> nn.Module:
    found: nn.Module = layer.linear_attn if layer.is_linear else layer.self_attn
    return found


def test_layers_that_write_no_cells_are_held_together() -> None:
    """The last layers of this model attend to the cells of earlier ones, so nothing is launched there."""
    changes = {"num_hidden_layers": 20, "num_kv_shared_layers": 16, "enable_moe_block": False}
    kinds = ["sliding_attention", "full_attention"] * 10
    trunk = flat_trunk("gemma4_text", layer_types=kinds, **changes)
    assert most_copied_bytes(trunk, None) > weight_bytes(*trunk.inner.layers[4:])


def test_the_layers_of_a_head_are_held_with_the_last_launches() -> None:
    trunk = flat_trunk("qwen3")
    head = LoadedHead((new_head(trunk), new_head(trunk)), "random")
    for layer in head.layers:
        layer.set_dtype(mx.bfloat16)
        nn.quantize(layer, group_size=32, bits=4)
        use_flat_matmuls(layer)
    of_head = 2 * (2 * 128 * 64 + DENSE_LAYER)
    assert most_copied_bytes(trunk, head) == 3 * DENSE_LAYER + of_head


def test_all_layers_of_a_draft_model_are_held() -> None:
    trunk = flat_trunk("qwen3", num_hidden_layers=LAUNCH_EVERY_LAYERS)
    draft_model = DraftModel(flat_trunk("qwen3", num_hidden_layers=MANY_LAYERS), "random")
    assert most_copied_bytes(trunk, draft_model) == (LAUNCH_EVERY_LAYERS + MANY_LAYERS) * DENSE_LAYER


def test_float32_weights_are_not_copied() -> None:
    assert most_copied_bytes(flat_trunk("qwen3", mx.float32), None) == 0


def test_copies_are_counted_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = flat_trunk("qwen3")
    monkeypatch.setattr(quantized_layers, "applies", lambda: False)
    assert copied_bytes(trunk) == 0
    monkeypatch.setattr(quantized_layers, "applies", lambda: True)
    assert copied_bytes(trunk) == 3 * DENSE_LAYER


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_moe", "falcon_h1"])
def test_a_real_pass_holds_as_much_as_was_counted(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plays the device: what a launch has copied is freed when the pass has waited for it."""
    trunk = flat_trunk(family, num_hidden_layers=MANY_LAYERS)
    counted = most_copied_bytes(trunk, None)
    held: list[int] = []
    built: list[int] = []
    peaks: list[int] = []

    def launch(*_: Any) -> None:
        held.append(sum(built))
        peaks.append(sum(held))
        built.clear()

    cache = TrunkCache(trunk.layout)
    for buffers in cache.buffers():
        buffers.resize(2, MANY_TOKENS)
    starts, num_fed, width = mx.array([0, 0]), mx.array([MANY_TOKENS // 2, 7]), MANY_TOKENS // 2
    place = Placement(
        range(2), starts, num_fed, width, width, MANY_TOKENS, commits_all=True, launches=True
    )  # most of the second row is padding
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "async_eval", launch)
    monkeypatch.setattr(mx, "eval", lambda *_: held.pop(0))
    with reported_copies(built.append):
        trunk.hidden(mx.zeros((2, width), mx.int32), cache, place)
    launch()  # at the end of the step
    assert len(peaks) > MAX_LAUNCHED + 1
    assert max(peaks) == counted
