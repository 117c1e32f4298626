"""What is handed to MLX for a kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from outrider import gpu_kernels
from outrider.cache import cell_kernels, cell_writes
from outrider.gpu_kernels import GpuKernel
from outrider.models import attention_kernels
from outrider.models.recurrent import fused_layer, recurrent_kernels

ATTENTION = (attention_kernels.PLAIN, attention_kernels.QUANTIZED)
KERNELS = [kernel for kernels in ATTENTION for kernel in kernels]
for module in (recurrent_kernels, fused_layer, attention_kernels, cell_kernels, cell_writes):
    KERNELS += [value for value in vars(module).values() if isinstance(value, GpuKernel)]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What MLX is told of kernels and their launches."""
    told: list[dict[str, Any]] = []

    def make(**kernel: Any) -> Any:
        told.append(kernel)
        return lambda **launch: told.append(launch) or []

    monkeypatch.setattr(mx.fast, "cuda_kernel", make)
    monkeypatch.setattr(mx.fast, "metal_kernel", make)
    gpu_kernels.compiled.cache_clear()
    yield told
    gpu_kernels.compiled.cache_clear()


def test_the_start_for_both_languages_names_what_bodies_use() -> None:
    assert len(KERNELS) == 15
    for start in (gpu_kernels._METAL, gpu_kernels._CUDA):
        for name in ("int lane", "int group_y", "int group_z"):
            assert name in start
        functions = ("EXP(x)", "EXP2(x)", "LOG(x)", "SQRT(x)", "FMA(x, y, z)", "GROUP_SUM(x)", "GROUP_MAX(x)")
        for name in (*functions, "SHUFFLE(x, i)", "SHARED", "BARRIER()", "VECTOR(type, pointer)"):
            assert f"#define {name}" in start


def test_another_source_has_another_name(made: list[dict[str, Any]]) -> None:
    """MLX finds compiled kernels, even those of an earlier process, by their names alone."""
    kernel = recurrent_kernels.STEP
    gpu_kernels.compiled(kernel)
    gpu_kernels.compiled(kernel)
    gpu_kernels.compiled(replace(kernel, body=kernel.body + ";"))
    first, second = (one["name"] for one in made)
    assert first.startswith("outrider_delta_step_")
    assert first != second


def test_types_are_among_the_constants(made: list[dict[str, Any]]) -> None:
    """Else a kernel compiled for one model's types would be run over another's."""
    kernel = GpuKernel("k", ("one", "two"), ("three",), "")
    inputs = [mx.zeros((2, 3), mx.bfloat16), mx.zeros(1, mx.int32)]
    gpu_kernels.run(kernel, inputs, {"SIZE": 5}, (6, 7), [((4,), mx.float16)])
    launch = made[1]
    assert launch["template"] == [
        ("SIZE", 5), ("ONE_TYPE", mx.bfloat16), ("TWO_TYPE", mx.int32), ("THREE_TYPE", mx.float16)
    ]  # fmt: skip
    assert launch["grid"] == (32, 6, 7)
    assert launch["threadgroup"] == (32, 2, 1)
    assert launch["output_shapes"] == [(4,)]
    assert launch["output_dtypes"] == [mx.float16]


def test_only_what_is_read_by_strides_may_have_gaps(made: list[dict[str, Any]]) -> None:
    for kernel in KERNELS:
        gpu_kernels.compiled(kernel)
        assert made[-1]["ensure_row_contiguous"] == (not kernel.strided)
        for name in kernel.inputs:
            assert (f" {name}_strides[" in kernel.body) == (name in kernel.strided)
    kernel = GpuKernel("k", ("one", "two", "whole"), ("three",), "", strided=("two",), contiguous=("whole",))
    part, result = mx.arange(12).reshape(3, 4)[:, :2], mx.zeros(4)
    gpu_kernels.run(kernel, [part, part, result], {}, (1, 1), [((4,), mx.float32)])
    one, two, whole = made[-1]["inputs"]
    assert one is not part  # laid out anew where need be
    assert two is part
    assert whole is result


def test_sources_are_handed_over_without_comments_and_indentation(made: list[dict[str, Any]]) -> None:
    """MLX reads them at every launch."""
    gpu_kernels.compiled(GpuKernel("k", ("one",), ("two",), "\n    if (a)  // why\n        b = a / 2;\n\n"))
    assert made[0]["source"].endswith("\nif (a)\nb = a / 2;\n")


def test_shared_memory_is_asked_for_where_it_is_needed(made: list[dict[str, Any]]) -> None:
    kernel = GpuKernel("k", ("one",), ("two",), "", groups_per_block=8, shared_bytes=4096)
    gpu_kernels.run(kernel, [mx.zeros(1)], {}, (16, 3), [((4,), mx.float32)])
    assert made[0]["shared_memory"] == 4096
    assert (made[1]["grid"], made[1]["threadgroup"]) == ((32, 16, 3), (32, 8, 1))
    gpu_kernels.compiled(replace(kernel, shared_bytes=0))
    assert "shared_memory" not in made[2]
