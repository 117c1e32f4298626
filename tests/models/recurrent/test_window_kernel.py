"""The GPU kernels of the delta rule. No GPU is needed: their source is compiled as C++, threads are lanes.

What this cannot show: that Metal's and CUDA's own compilers take it. Before its first use on a device a
kernel is compared with the portable form there.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider.models.recurrent import window_kernel
from outrider.models.recurrent.delta_rule import delta_rule

LANES = 32
START = """
#include <barrier>
#include <cmath>
#include <thread>
#include <vector>
static std::barrier<> meet(32);
static float shared_sum[32];
static float group_sum(int lane, float x) {
    shared_sum[lane] = x;
    meet.arrive_and_wait();
    float total = 0;
    for (int i = 0; i < 32; ++i) total += shared_sum[i];
    meet.arrive_and_wait();
    return total;
}
#define EXP(x) std::exp(x)
#define GROUP_SUM(x) group_sum(lane, x)
"""


class FakeKernel:
    """Takes what MLX's kernel objects take, and runs the body on the CPU."""

    def __init__(
        self, folder: Path, name: str, body: str, inputs: tuple[str, ...], outputs: tuple[str, ...]
    ) -> None:
        self.folder, self.name, self.body, self.inputs, self.outputs = folder, name, body, inputs, outputs
        self.calls: list[dict[str, Any]] = []

    def __call__(self, inputs: list[mx.array], template: Any, **call: Any) -> list[mx.array]:
        self.calls.append(call)
        arrays = [np.ascontiguousarray(np.array(x)) for x in inputs]
        results = [np.zeros(shape, np.float32) for shape in call["output_shapes"]]
        _, value_rows, head_rows = call["grid"]
        run = self._compiled(dict(template), [array.dtype for array in arrays])
        run(*(array.ctypes.data_as(ctypes.c_void_p) for array in (*arrays, *results)), value_rows, head_rows)
        return [mx.array(result) for result in results]

    def _compiled(self, template: dict[str, int], dtypes: list[np.dtype]) -> Any:
        kinds = {np.dtype(np.float32): "float", np.dtype(np.int32): "int"}
        constants = "".join(f"constexpr int {name} = {value};\n" for name, value in template.items())
        arguments = [f"const {kinds[dtype]}* {name}" for name, dtype in zip(self.inputs, dtypes, strict=True)]
        arguments += [f"float* {name}" for name in self.outputs]
        source = f"""{START}{constants}
        extern "C" void run({", ".join(arguments)}, int value_rows, int head_rows) {{
            std::vector<std::thread> lanes;
            for (int lane = 0; lane < 32; ++lane) lanes.emplace_back([=] {{
                for (int head_row = 0; head_row < head_rows; ++head_row)
                for (int value_row = 0; value_row < value_rows; ++value_row) {{ {self.body} }}
            }});
            for (auto& lane : lanes) lane.join();
        }}"""
        file = self.folder / f"{self.name}{len(self.calls)}.cpp"  # a library is loaded once by its name
        file.write_text(source)
        library = file.with_suffix(".so")
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", str(file), "-o", str(library)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library)).run


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeKernel]:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    made = {
        "window": FakeKernel(
            tmp_path, "window", window_kernel._WINDOW, window_kernel._INPUTS, ("outputs", "deltas")
        ),
        "commit": FakeKernel(
            tmp_path, "commit", window_kernel._COMMIT,
            ("keys", "log_gates", "deltas", "state", "num_kept"), ("new_state",),
        ),
    }  # fmt: skip
    monkeypatch.setattr(window_kernel, "_kernel", made.__getitem__)
    return made


def test_the_kernels_equal_the_portable_form(kernels: dict[str, FakeKernel]) -> None:
    inputs = window_kernel._trial()
    want, corrections = delta_rule(*inputs)
    got, window = window_kernel.window(*inputs)
    np.testing.assert_allclose(np.array(got), np.array(want), atol=1e-5)
    for kept in ([0, 3], [2, 1]):
        found = window.state_after(mx.array(kept))
        np.testing.assert_allclose(
            np.array(found), np.array(corrections.state_after(mx.array(kept))), atol=1e-5
        )


def test_a_lane_group_for_every_row_of_every_head(kernels: dict[str, FakeKernel]) -> None:
    window_kernel.window(*window_kernel._trial())
    (call,) = kernels["window"].calls
    assert call["grid"] == (LANES, 16, 2 * 4)  # lanes, value rows, rows x heads
    assert call["threadgroup"] == (LANES, 4, 1)
    assert call["output_shapes"] == [(2, 3, 4, 16), (2, 3, 4, 16)]


def test_kernels_that_agree_are_used_and_others_are_not(
    kernels: dict[str, FakeKernel], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agrees = window_kernel._agrees.__wrapped__
    assert agrees()
    kernels["commit"].body = kernels["commit"].body.replace("cell[i] * gate", "cell[i]")
    assert not agrees()
    assert "off by" in caplog.text

    def broken(**_: object) -> None:
        raise RuntimeError("does not compile")

    monkeypatch.setattr(window_kernel, "_kernel", lambda name: broken)
    assert not agrees()
    assert "does not compile" in caplog.text


@pytest.mark.parametrize(
    ("tokens", "key_dim", "gate_dims", "fits"),
    [(9, 64, 3, True), (17, 64, 3, False), (9, 48, 3, False), (9, 64, 4, False)],
)
def test_what_goes_to_the_kernels(
    monkeypatch: pytest.MonkeyPatch, tokens: int, key_dim: int, gate_dims: int, fits: bool
) -> None:
    keys, values = mx.zeros((1, tokens, 2, key_dim)), mx.zeros((1, tokens, 2, 16))
    log_gates = mx.zeros((1, tokens, 2, key_dim)[:gate_dims])
    assert not window_kernel.fits(keys, values, log_gates)  # no GPU
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(window_kernel, "_agrees", lambda: True)
    assert window_kernel.fits(keys, values, log_gates) is fits


def test_the_source_for_both_languages_names_what_the_bodies_use() -> None:
    for start in (window_kernel._METAL, window_kernel._CUDA):
        for name in ("lane", "value_row", "head_row", "EXP", "GROUP_SUM"):
            assert name in start
