"""The GPU kernels of the delta rule, run as C++, against the chunked form."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from outrider import gpu_kernels
from outrider.gpu_kernels import LANES
from outrider.models.recurrent import recurrent_kernels
from outrider.models.recurrent.delta_rule import chunk_delta_rule
from outrider.models.recurrent.recurrent_kernels import ConvolutionInputs
from recurrent.cpp_kernels import CppKernels


@pytest.mark.parametrize("language", ["Metal", "CUDA"])
def test_the_kernels_equal_the_chunked_form(kernels: CppKernels, language: str) -> None:
    kernels.language = language
    rule = recurrent_kernels.random_inputs()
    want, update = chunk_delta_rule(*rule)
    got, window = recurrent_kernels.window(*rule)
    np.testing.assert_allclose(np.array(got), np.array(want), atol=1e-5)
    for kept in ([0, 3], [2, 1]):
        found = window.state_after(mx.array(kept))
        np.testing.assert_allclose(np.array(found), np.array(update.state_after(mx.array(kept))), atol=1e-5)


def test_a_prompt_goes_token_by_token(kernels: CppKernels) -> None:
    rule = recurrent_kernels.random_inputs(70)
    want, update = chunk_delta_rule(*rule)
    got, after = recurrent_kernels.step(*rule)
    np.testing.assert_allclose(np.array(got), np.array(want), atol=1e-5)
    np.testing.assert_allclose(np.array(after), np.array(update.state_after_all()), atol=1e-5)


def test_a_step_is_a_window_of_which_all_stands_to_the_last_bit(kernels: CppKernels) -> None:
    rule = recurrent_kernels.random_inputs()
    got, window = recurrent_kernels.window(*rule)
    stepped, after = recurrent_kernels.step(*rule)
    assert mx.array_equal(stepped, got)
    assert mx.array_equal(after, window.state_after(mx.array([3, 3])))


def test_the_inputs_of_the_convolution_stay_with_the_state(kernels: CppKernels) -> None:
    rule = recurrent_kernels.random_inputs()
    # More channels than a row has lanes would need another round: 700 x 3 of them, 4 x 16 x 32 lanes.
    columns = mx.random.normal((2, 3 + 3, 700)).astype(mx.bfloat16)
    seen = ConvolutionInputs(columns[:, :3], columns[:, 3:])
    _, window = recurrent_kernels.window(*rule)
    new_state, past = window.state_and_past_after(mx.array([0, 2]), seen)
    assert mx.array_equal(new_state, window.state_after(mx.array([0, 2])))
    assert mx.array_equal(past[0], columns[0, :3])
    assert mx.array_equal(past[1], columns[1, 2:5])
    _, after, past = recurrent_kernels.step_and_past(rule, mx.array([3, 1]), seen)
    assert mx.array_equal(after, window.state_after(mx.array([3, 3])))  # what is padding says the rule
    assert mx.array_equal(past[0], columns[0, 3:])
    assert mx.array_equal(past[1], columns[1, 1:4])


def test_a_lane_group_for_every_row_of_every_head(kernels: CppKernels) -> None:
    recurrent_kernels.window(*recurrent_kernels.random_inputs())
    (call,) = kernels.made["delta_window"].calls
    assert call["grid"] == (LANES, 16, 2 * 4)  # lanes, value rows, rows x heads
    assert call["threadgroup"] == (LANES, 4, 1)
    assert call["output_shapes"] == [(2, 3, 4, 16), (2, 3, 4, 16)]


@pytest.mark.parametrize("name", ["delta_commit", "delta_step"])
def test_kernels_that_agree_are_used_and_others_are_not(
    kernels: CppKernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    agrees = recurrent_kernels._agrees.__wrapped__
    assert agrees()
    kernels.made[name].break_it("cell[i] *= gate", "cell[i] *= 1")
    assert not agrees()
    assert "off by" in caplog.text

    def broken(**_: object) -> None:
        raise RuntimeError("does not compile")

    monkeypatch.setattr(gpu_kernels, "compiled", lambda kernel: broken)
    assert not agrees()
    assert "does not compile" in caplog.text


@pytest.mark.parametrize(
    ("tokens", "key_dim", "gate_dims", "fits"),
    [(9, 64, 3, True), (2048, 64, 3, True), (9, 48, 3, False), (9, 64, 4, False)],
)
def test_what_goes_to_the_kernels(
    monkeypatch: pytest.MonkeyPatch, tokens: int, key_dim: int, gate_dims: int, fits: bool
) -> None:
    keys, values = mx.zeros((1, tokens, 2, key_dim)), mx.zeros((1, tokens, 2, 16))
    log_gates = mx.zeros((1, tokens, 2, key_dim)[:gate_dims])
    assert not recurrent_kernels.fits(keys, values, log_gates)  # no GPU
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(recurrent_kernels, "_agrees", lambda: True)
    assert recurrent_kernels.fits(keys, values, log_gates) is fits
