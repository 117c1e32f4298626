"""The quantised matmul of few tokens: its source for CUDA, compiled as C++, against dequantised weights."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cuda_kernels import on_cpu
from recurrent.cpp_kernels import CppKernels, cpp_folder, kernels

from outrider.models import cuda_qmm

__all__ = ["cpp_folder", "kernels", "on_cpu"]


def quantised(
    shape: tuple[int, ...], bits: int = 4, group_size: int = 64, dtype: mx.Dtype = mx.bfloat16
) -> nn.Module:
    layer = cuda_qmm._random_layer(shape, bits, group_size, dtype, mx.random.key(1))
    return layer


def as_float(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32))


@pytest.mark.parametrize(
    ("bits", "group_size", "counts"), [(4, 64, (1, 5, 8, 9, 16, 31, 40)), (4, 128, (3,)), (8, 32, (8,))]
)
def test_few_tokens_give_what_dequantised_weights_give(
    on_cpu: CppKernels, bits: int, group_size: int, counts: tuple[int, ...]
) -> None:
    layer = quantised(
        (37, 5 * 4 * group_size), bits, group_size
    )  # neither whole tiles nor whole turns of the warps
    x = mx.random.normal((40, layer.scales.shape[-1] * group_size), key=mx.random.key(2)).astype(mx.bfloat16)
    want = as_float(x) @ as_float(cuda_qmm._dequantized(layer)).T
    first: mx.array | None = None
    for num in counts:
        found = cuda_qmm.matmul(x[:num], layer)
        assert found.shape == (num, 37)
        assert np.abs(as_float(found) - want[:num]).max() <= 2e-2  # a bfloat16 has 8 bits
        first = found[0] if first is None else first
        assert mx.array_equal(found[0], first)  # to the bit, whatever is beside it


def test_experts_get_the_tokens_that_chose_them(on_cpu: CppKernels) -> None:
    layer = quantised((3, 24, 512))
    x = mx.random.normal((2, 512), key=mx.random.key(2)).astype(mx.bfloat16)
    experts = [2, 0, 1, 2]
    found = as_float(cuda_qmm.gather_matmul(x, mx.array(experts, mx.uint32), layer))
    weights = as_float(cuda_qmm._dequantized(layer))
    for i, expert in enumerate(experts):
        assert np.abs(found[i] - as_float(x)[i // 2] @ weights[expert].T).max() <= 2e-2


def test_layers_that_the_kernels_cannot_compute_are_left_to_mlx(
    on_cpu: CppKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_qmm, "_agrees", lambda *_: True)
    assert cuda_qmm.supports(quantised((24, 512)))
    assert cuda_qmm.supports(quantised((24, 512), bits=8, group_size=32, dtype=mx.float16))
    assert not cuda_qmm.supports(quantised((24, 512), bits=6))
    assert not cuda_qmm.supports(quantised((24, 512), dtype=mx.float32))
    assert not cuda_qmm.supports(quantised((24, 320)))  # not whole steps
    other_mode = quantised((24, 512))
    other_mode.mode = "mxfp4"
    assert not cuda_qmm.supports(other_mode)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    assert not cuda_qmm.supports(quantised((24, 512)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("fmaf(bias, totals[n][t], sum)", "sum"),  # wrong by the biases
        (
            "total += last_sums[p][token][row];",
            "total += last_sums[p][token][row] + (TOKEN_TILES > 1 ? 1e-3f : 0);",
        ),  # for many tokens
    ],
)
def test_kernels_that_are_wrong_on_a_device_are_not_used(
    on_cpu: CppKernels, old: str, new: str, caplog: pytest.LogCaptureFixture
) -> None:
    for variant in cuda_qmm.DENSE:
        on_cpu(variant.kernel).break_it(old, new)
    assert not cuda_qmm.supports(quantised((24, 512)))
    assert "quantised-matmul kernels are off by" in caplog.text
