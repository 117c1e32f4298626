"""A layer of Qwen's in three or four kernels, run as C++, against the reference layer."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from outrider import gpu_kernels
from outrider.models.recurrent import fused_layer, recurrent_kernels
from outrider.models.recurrent.fused_layer_check import largest_error
from outrider.models.recurrent.layer_inputs import LayerSizes, Projected
from outrider.models.trunk import Trunk
from ragged_rows import RaggedRows, error
from recurrent.cpp_kernels import CppKernels
from tiny_models import tiny_model

FLOATS = (mx.float32,) * 4
HALVES = (mx.bfloat16, mx.float32, mx.bfloat16)
SIZES = {
    "small": LayerSizes(1, 2, 32, 32, 3, mx.float32, FLOATS),
    "dims": LayerSizes(1, 2, 64, 32, 1, mx.float32, FLOATS),
    "one to one": LayerSizes(3, 3, 32, 96, 3, mx.float32, FLOATS),
    "bfloat16": LayerSizes(2, 4, 64, 32, 3, mx.bfloat16, (*HALVES, mx.bfloat16)),
    "a norm in float32": LayerSizes(2, 4, 64, 32, 3, mx.bfloat16, (*HALVES, mx.float32)),
}


@pytest.mark.parametrize(("name", "language"), [*((name, "Metal") for name in SIZES), ("bfloat16", "CUDA")])
def test_the_kernels_equal_the_parts(kernels: CppKernels, name: str, language: str) -> None:
    sizes, kernels.language = SIZES[name], language
    assert largest_error(fused_layer.gated_outputs, sizes) < (1e-5 if sizes.dtype == mx.float32 else 1e-2)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("delta_prepare", "LOG(1 + e)", "e"),
        ("delta_prepare", "length * SQRT((float)KEY_DIM)", "length"),
        ("delta_prepare", "t < num_fed[row]", "true"),
        ("delta_gate", "/ VALUE_DIM", ""),
        ("delta_step_and_past", "num_committed[row] +", "1 +"),
        ("delta_commit_and_past", "num_committed[row] +", "1 +"),
        ("delta_commit_and_past", "t < num_committed[row]", "t < tokens"),
    ],
)
def test_kernels_that_are_off_are_not_used(
    kernels: CppKernels, caplog: pytest.LogCaptureFixture, name: str, old: str, new: str
) -> None:
    agrees = fused_layer._agrees.__wrapped__
    assert agrees(SIZES["small"])
    kernels.made[name].break_it(old, new)
    assert not agrees(SIZES["small"])
    assert "delta-layer kernels are off by" in caplog.text


def history(trunk: Trunk) -> list[np.ndarray]:
    """Rows that join, are fed at different widths, and have drafts rejected."""
    rows = RaggedRows(trunk, num_slots=3, capacity=32)
    rows.scribble()
    rows.join("a", 0)
    found = [rows.feed({"a": [5, 6, 7]}, commits_all=True)["a"]]
    rows.join("b", 2)
    found += rows.feed({"b": [8], "a": [9, 10]}).values()
    rows.roll_back("a", 1)
    found += rows.feed({"a": [11, 12, 13], "b": [14]}).values()
    rows.roll_back("a", 3)
    found += rows.feed({"a": [15], "b": [16, 17]}, commits_all=True).values()
    found += rows.feed({"a": [18], "b": [19]}, commits_all=True).values()
    return found


@pytest.mark.parametrize(
    ("family", "kernel"),
    [("qwen3_5", "delta_gate"), ("qwen3_next", "delta_gate"), ("olmo_hybrid", "delta_step")],
)
def test_models_of_such_layers_compute_the_same(
    kernels: CppKernels, monkeypatch: pytest.MonkeyPatch, family: str, kernel: str
) -> None:
    model = tiny_model(family, linear_key_head_dim=32, linear_value_head_dim=32)
    want = history(Trunk(model, 64))
    monkeypatch.setattr(gpu_kernels, "is_available", lambda: True)
    monkeypatch.setattr(fused_layer, "_agrees", lambda sizes: True)
    monkeypatch.setattr(recurrent_kernels, "_agrees", lambda: True)
    got = history(Trunk(model, 64))
    assert len(kernels.made[kernel].calls) >= 3  # of every pass that can use it
    for one, other in zip(got, want, strict=True):
        assert error(one, other) < 1e-4


@pytest.mark.parametrize("family", ["qwen3_5", "olmo_hybrid"])
def test_with_drafts_and_without_the_states_are_the_same_to_the_last_bit(
    kernels: CppKernels, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    model = tiny_model(family, linear_key_head_dim=32, linear_value_head_dim=32)
    monkeypatch.setattr(gpu_kernels, "is_available", lambda: True)
    monkeypatch.setattr(fused_layer, "_agrees", lambda sizes: True)
    monkeypatch.setattr(recurrent_kernels, "_agrees", lambda: True)
    found = []
    for commits_all in (True, False):
        rows = RaggedRows(Trunk(model, 64), num_slots=2, capacity=32)
        rows.join("a", 1)
        rows.feed({"a": [5, 6, 7]}, commits_all=commits_all)
        found.append(rows.feed({"a": [8]}, commits_all=commits_all)["a"])
        rows.commit()
        found += [np.array(part) for states in rows.cache.buffers() for part in states.arrays()]
    half = len(found) // 2
    for one, other in zip(found[:half], found[half:], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("changes", "width", "fits"),
    [
        ({}, 16, True),
        ({"linear_conv_kernel_dim": 2}, 1, True),
        ({}, 17, False),
        ({"linear_key_head_dim": 48}, 1, False),
        ({"linear_value_head_dim": 16}, 1, False),
    ],
)
def test_what_goes_to_the_kernels(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], width: int, fits: bool
) -> None:
    dims = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    layer = Trunk(tiny_model("qwen3_5", **(dims | changes)), 64).inner.layers[0].linear_attn
    projected = Projected(*layer._projected(mx.zeros((2, width, 64))))
    monkeypatch.setattr(fused_layer, "_agrees", lambda sizes: True)
    assert not fused_layer.fits(layer, projected)  # no GPU
    monkeypatch.setattr(gpu_kernels, "is_available", lambda: True)
    assert fused_layer.fits(layer, projected) is fits
    layer.conv1d.bias = mx.zeros(projected[0].shape[-1])
    assert not fused_layer.fits(layer, projected)
