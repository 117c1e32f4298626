"""GPU kernels without a GPU: their bodies are compiled as C++, and 32 threads are the lanes of a group.

What this cannot show: that Metal's and CUDA's own compilers take them. Types are as strict as Metal's:
nothing becomes a bfloat that is not told to.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider.models.recurrent import gpu_kernels
from outrider.models.recurrent.gpu_kernels import LANES, Kernel

START = """
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
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
struct bfloat {
    uint16_t bits;
    bfloat() = default;
    explicit bfloat(float x) {
        uint32_t all;
        std::memcpy(&all, &x, 4);
        bits = (all + 0x7fff + ((all >> 16) & 1)) >> 16;
    }
    explicit operator float() const {
        uint32_t all = uint32_t(bits) << 16;
        float x;
        std::memcpy(&x, &all, 4);
        return x;
    }
};
#define EXP(x) std::exp(x)
#define LOG(x) std::log(x)
#define SQRT(x) std::sqrt(x)
#define FMA(x, y, z) std::fma(x, y, z)
#define GROUP_SUM(x) group_sum(lane, x)
"""
TYPES = {mx.float32: "float", mx.int32: "int", mx.bfloat16: "bfloat"}


class CppKernel:
    """Takes what MLX's kernel objects take, and runs the body on the CPU."""

    def __init__(self, folder: Path, kernel: Kernel) -> None:
        self.folder, self.kernel = folder, kernel
        self.calls: list[dict[str, Any]] = []

    def __call__(self, inputs: list[mx.array], template: Any, **call: Any) -> list[mx.array]:
        self.calls.append(call)
        _, group_y, group_z = call["grid"]
        assert group_y % call["threadgroup"][1] == 0  # CUDA would run over the end
        strided = self.kernel.strided
        arrays = [
            _laid_out(x, with_gaps=name in strided)
            for name, x in zip(self.kernel.inputs, inputs, strict=True)
        ]
        shapes = [np.array(x.shape, np.int32) for x in inputs]
        strides = [np.array(x.strides, np.int64) // x.itemsize for x in arrays]
        outputs = list(zip(call["output_shapes"], call["output_dtypes"], strict=True))
        results = [np.full(shape, 0xA5, np.uint8) for shape in ((*s, d.size) for s, d in outputs)]
        pointers = [x.ctypes.data_as(ctypes.c_void_p) for x in (*arrays, *shapes, *strides, *results)]
        _compiled(self._source(dict(template)), self.folder)(*pointers, group_y, group_z)
        return [_array_of(result, dtype) for result, (_, dtype) in zip(results, outputs, strict=True)]

    def break_it(self, old: str, new: str) -> None:
        assert old in self.kernel.body
        self.kernel = replace(self.kernel, body=self.kernel.body.replace(old, new))

    def _source(self, template: dict[str, Any]) -> str:
        constants = "".join(
            f"constexpr int {name} = {value};\n"
            if isinstance(value, int)
            else f"using {name} = {TYPES[value]};\n"
            for name, value in template.items()
        )
        kernel = self.kernel
        arguments = [f"const {name.upper()}_TYPE* {name}" for name in kernel.inputs]
        arguments += [f"const int* {name}_shape" for name in kernel.inputs]
        arguments += [f"const int64_t* {name}_strides" for name in kernel.inputs]
        arguments += [f"{name.upper()}_TYPE* {name}" for name in kernel.outputs]
        return f"""{START}{constants}
        extern "C" void run({", ".join(arguments)}, int num_y, int num_z) {{
            std::vector<std::thread> lanes;
            for (int lane = 0; lane < {LANES}; ++lane) lanes.emplace_back([=] {{
                for (int group_z = 0; group_z < num_z; ++group_z)
                for (int group_y = 0; group_y < num_y; ++group_y) {{ {kernel.body} }}
            }});
            for (auto& lane : lanes) lane.join();
        }}"""


class CppKernels:
    """Stand in for what `gpu_kernels.compiled` makes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[str, CppKernel] = {}

    def __call__(self, kernel: Kernel) -> CppKernel:
        if kernel.name not in self.made:
            self.made[kernel.name] = CppKernel(self.folder, kernel)
        return self.made[kernel.name]


@pytest.fixture(scope="session")
def cpp_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def kernels(cpp_folder: Path, monkeypatch: pytest.MonkeyPatch) -> CppKernels:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    made = CppKernels(cpp_folder)
    monkeypatch.setattr(gpu_kernels, "compiled", made)
    return made


def _laid_out(x: mx.array, with_gaps: bool) -> np.ndarray:
    """The numbers of an array; with gaps, as a part of a larger one whose other numbers are none."""
    numbers = np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)
    if not with_gaps:
        return np.ascontiguousarray(numbers)
    none = 0x7FFF if x.dtype == mx.bfloat16 else np.nan
    whole = np.full((*x.shape[:-1], x.shape[-1] + 3), none, numbers.dtype)
    part = whole[..., : x.shape[-1]]
    part[:] = numbers
    return part


def _array_of(result: np.ndarray, dtype: mx.Dtype) -> mx.array:
    return mx.array(result).view(dtype)[..., 0]


@cache
def _compiled(source: str, folder: Path) -> Any:
    file = folder / f"kernel{len(list(folder.glob('*.cpp')))}.cpp"  # a library is loaded once by its name
    file.write_text(source)
    library = file.with_suffix(".so")
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", str(file), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library)).run
