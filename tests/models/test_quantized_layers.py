"""Quantised layers as on CUDA, on the CPU: what they give is what mlx-lm's own layers give."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cuda_kernels import on_cpu
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from recurrent.cpp_kernels import CppKernels, cpp_folder, kernels

from outrider.cpu import fast_math
from outrider.models import cuda_qmm, machine, quantized_layers
from outrider.models.layer_swaps import without_speed_swaps
from outrider.models.merged_linear import MergedFlatQuantizedLinearPart
from outrider.models.quantized_layers import (
    FlatQuantizedEmbedding,
    FlatQuantizedLinear,
    FlatQuantizedSwitchLinear,
    use_flat_matmuls,
)
from outrider.models.trunk import Trunk
from outrider.plan import MANY_TOKENS
from outrider.request import MAX_DEPTH
from ragged_rows import RaggedRows, error, solo_logits
from tiny_models import VOCAB_SIZE, tiny_model

__all__ = ["cpp_folder", "kernels", "on_cpu"]
TEXT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(24)]


def quantised(
    layer: nn.Module, bits: int = 4, group_size: int = 32, dtype: mx.Dtype = mx.float32
) -> nn.Module:
    """A model of this one layer, quantised."""
    model = nn.Module()
    model.layer = layer
    model.set_dtype(dtype)
    nn.quantize(model, 32, bits)
    return model


def numbers(shape: tuple[int, ...], dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(3)).astype(dtype)


def counted_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[int, ...]]:
    """The shapes of the inputs that a function of mx is called with from now on."""
    shapes: list[tuple[int, ...]] = []
    plain = getattr(mx, name)

    def counted(x: mx.array, *args: Any, **named: Any) -> mx.array:
        shapes.append(x.shape)
        return plain(x, *args, **named)

    monkeypatch.setattr(mx, name, counted)
    return shapes


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_multiplies_all_tokens_at_once(
    bits: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = quantised(nn.Linear(64, 24, bias=bias), bits), numbers((3, 2, 64))
    if bias:
        model.layer.bias = numbers((24,))
    want = model.layer(x)
    use_flat_matmuls(model)
    assert type(model.layer) is FlatQuantizedLinear
    shapes = counted_calls(monkeypatch, "quantized_matmul")
    assert mx.array_equal(model.layer(x), want)
    assert shapes == [(6, 64)]


@pytest.mark.parametrize("bits", [4, 8])
def test_many_tokens_are_multiplied_by_dequantised_weights(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantised(nn.Linear(64, 24, bias=False), bits, dtype=mx.bfloat16)
    many = MANY_TOKENS
    x = numbers((2, many // 2, 64), mx.bfloat16)
    want = model.layer(x)
    use_flat_matmuls(model)
    calls = counted_calls(monkeypatch, "quantized_matmul")
    found = model.layer(x)
    assert found.shape == want.shape
    # Both round to bfloat16, each in its own places: 0.02 happens with random weights.
    assert mx.abs(found - want).max() < 0.05 * mx.abs(want).max()
    assert calls == []
    model.layer(x[:, 1:])
    assert calls == [(many - 2, 64)], "fewer tokens"
    monkeypatch.setattr(quantized_layers, "MAX_DEQUANTIZED_BYTES", 24 * 64 * 2 - 1)
    model.layer(x)
    assert len(calls) == 2, "too large a copy"


def test_decode_passes_of_many_rows_copy_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are traced, so nothing waits for the device: the copies of all layers would exist at once."""
    model = quantised(nn.Linear(64, 24, bias=False), dtype=mx.bfloat16)
    use_flat_matmuls(model)
    copies = counted_calls(monkeypatch, "dequantize")
    width = 1 + MAX_DEPTH
    rows = -(-MANY_TOKENS // width)
    model.layer(numbers((rows, width, 64), mx.bfloat16))
    assert copies == []
    model.layer(numbers((rows, width + 1, 64), mx.bfloat16))
    assert len(copies) == 1


def test_a_layer_may_be_called_with_a_single_token() -> None:
    model = quantised(nn.Linear(64, 24, bias=False), dtype=mx.bfloat16)
    x = numbers((64,), mx.bfloat16)
    want = model.layer(x)
    use_flat_matmuls(model)
    assert mx.array_equal(model.layer(x), want)


def test_an_embedding_is_an_output_projection_too() -> None:
    model, x = quantised(nn.Embedding(40, 64)), numbers((3, 2, 64))
    want, rows = model.layer.as_linear(x), model.layer(mx.array([[3, 7]]))
    use_flat_matmuls(model)
    assert type(model.layer) is FlatQuantizedEmbedding
    assert mx.array_equal(model.layer.as_linear(x), want)
    assert mx.array_equal(model.layer(mx.array([[3, 7]])), rows)


def test_a_model_gives_what_it_gave_and_can_be_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_math, "applies", lambda: False)
    monkeypatch.setattr(machine, "outruns_host", lambda: True)
    monkeypatch.setattr(quantized_layers, "applies", lambda: True)
    for family in ("qwen3_5", "qwen3_5_moe"):
        model = tiny_model(family)
        nn.quantize(model, group_size=32, bits=4)
        want = solo_logits(model, TEXT)
        trunk = Trunk(model, max_context=256)
        trunk.prepare_for_serving()
        kinds = {type(module) for _, module in model.named_modules()}
        assert MergedFlatQuantizedLinearPart in kinds
        assert (FlatQuantizedSwitchLinear in kinds) == (family == "qwen3_5_moe")
        rows = RaggedRows(trunk, num_slots=2, capacity=64)
        rows.join("a", slot=0)
        rows.join("b", slot=1)
        first = rows.feed({"a": TEXT[:20], "b": TEXT[5:9]})["a"]
        second = rows.feed({"a": TEXT[20:24], "b": TEXT[9:10]})["a"]
        assert error(np.concatenate([first, second]), want) <= 1e-5
        with without_speed_swaps(model):
            kinds = {type(module) for _, module in model.named_modules()}
            assert not kinds & {MergedFlatQuantizedLinearPart, FlatQuantizedLinear, FlatQuantizedSwitchLinear}
            assert (solo_logits(model, TEXT) == want).all()


# -- with the kernels, in C++ ----------------------------------------------------------------------------


@pytest.fixture
def trusted(on_cpu: CppKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_qmm, "_agrees", lambda *_: True)


def is_close(found: mx.array, want: mx.array) -> bool:
    return bool(mx.abs(found - want).max() <= 2e-2)  # a bfloat16 has 8 bits


@pytest.mark.usefixtures("trusted")
def test_few_tokens_go_to_the_kernel_and_many_to_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantised(nn.Linear(256, 24), dtype=mx.bfloat16)
    few, many = numbers((3, 2, 256), mx.bfloat16), numbers((3, 50, 256), mx.bfloat16)
    want = [model.layer(x.astype(mx.float32)) for x in (few, many)]
    use_flat_matmuls(model)
    shapes = counted_calls(monkeypatch, "quantized_matmul")
    assert is_close(model.layer(few), want[0])
    assert shapes == []
    assert model.layer(many).shape == (3, 50, 24)
    assert model.layer(few.astype(mx.float32)).dtype == mx.float32  # not the type of the kernel
    assert shapes == [(150, 256), (6, 256)]


@pytest.mark.usefixtures("trusted")
def test_experts_take_tokens_alone_in_groups_and_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantised(SwitchLinear(256, 16, 5), dtype=mx.bfloat16)
    model.layer.bias = numbers((5, 16), mx.bfloat16)
    indices = mx.array([[[0, 4]], [[3, 3]], [[1, 0]]])  # [rows, width, experts of a token]
    shared, own = numbers((3, 1, 1, 1, 256), mx.bfloat16), numbers((3, 1, 2, 1, 256), mx.bfloat16)
    in_order = numbers((6, 1, 256), mx.bfloat16)
    cases = [(shared, indices), (own, indices), (in_order, indices.flatten())]
    assert type(model.layer) is QuantizedSwitchLinear
    want = [model.layer(x.astype(mx.float32), ids) for x, ids in cases]
    use_flat_matmuls(model)
    shapes = counted_calls(monkeypatch, "gather_qmm")
    for case, plain in zip(cases, want, strict=True):
        found = model.layer(*case)
        assert found.shape == plain.shape
        assert is_close(found, plain)
    assert shapes == []
    monkeypatch.setattr(quantized_layers, "MAX_EXPERT_PAIRS", 5)
    assert model.layer(*cases[0]).shape == want[0].shape
    assert shapes == [shared.shape]
