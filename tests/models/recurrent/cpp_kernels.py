"""GPU kernels without a GPU: their source for Metal or CUDA, compiled as C++.

All lanes of a block run one after the other in a single thread: a lane hands over to the next one of its
group, or of its block, where it has to wait for the others' numbers. Threads would compute the same, but
would mostly be waking each other.

What the two languages bring along is stood in for: where a thread is, sums and shuffles over a group, shapes
and strides as MLX declares them. Types are as strict as Metal's: nothing becomes a bfloat unless told to.
What this cannot show: that Metal's and CUDA's own compilers take it.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider import gpu_kernels
from outrider.gpu_kernels import GpuKernel

START = """
#define _XOPEN_SOURCE 700
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
struct Shape { int32_t sizes[8]; int32_t operator[](int i) const { return sizes[i]; } };
struct Strides { int64_t sizes[8]; int64_t operator[](int i) const { return sizes[i]; } };
struct Place { unsigned x, y, z; };
constexpr int MOST = 256;  // lanes of a block
static ucontext_t caller, contexts[MOST];  // where a lane begins
static jmp_buf places[MOST];  // where a lane waits: to go on there takes no system call
alignas(64) static char stacks[MOST][1 << 16];
static bool has_begun[MOST], has_ended[MOST];
static int current, num_lanes;  // the lane that runs, and those of a block
static float shared[32];
static void go_on(int next) {
    current = next;
    if (has_ended[current]) abort();  // it should have waited too
    if (has_begun[current]) _longjmp(places[current], 1);
    has_begun[current] = true;
    setcontext(&contexts[current]);
}
static void hand_over(int next) {
    if (_setjmp(places[current]) == 0) go_on(next);
}
static void end_lane() {
    has_ended[current] = true;
    if (current + 1 == num_lanes) setcontext(&caller);
    go_on(current + 1);
}
static void wait_for_all_lanes() { hand_over(current / 32 * 32 + (current + 1) % 32); }  // of the group
static void wait_for_block() { hand_over((current + 1) % num_lanes); }
template <class Lane> static void run_lanes(int num, const Lane& one) {
    static const Lane* running;
    running = &one;
    num_lanes = num;
    if (num > MOST) abort();
    for (int lane = 0; lane < num; ++lane) {
        has_begun[lane] = has_ended[lane] = false;
        getcontext(&contexts[lane]);
        contexts[lane].uc_stack.ss_sp = stacks[lane];
        contexts[lane].uc_stack.ss_size = sizeof(stacks[lane]);
        contexts[lane].uc_link = nullptr;  // a lane never returns
        makecontext(&contexts[lane], [] { (*running)(); end_lane(); }, 0);
    }
    current = 0;
    has_begun[0] = true;
    swapcontext(&caller, &contexts[0]);
}
struct bfloat {
    uint16_t bits;
    bfloat() = default;
    explicit bfloat(float x) {
        uint32_t all;
        memcpy(&all, &x, 4);
        bits = (all + 0x7fff + ((all >> 16) & 1)) >> 16;
    }
    explicit operator float() const {
        uint32_t all = uint32_t(bits) << 16;
        float x;
        memcpy(&x, &all, 4);
        return x;
    }
};
"""
METAL = """
#define device
#define threadgroup static
#define threadgroup_barrier(what) wait_for_block()
namespace metal {
static float exp(float x) { return expf(x); }
static float exp2(float x) { return exp2f(x); }
static float fma(float x, float y, float z) { return fmaf(x, y, z); }
static float log(float x) { return logf(x); }
static float sqrt(float x) { return sqrtf(x); }
}
typedef unsigned short ushort;
static Place thread_position_in_threadgroup, thread_position_in_grid;
static float simd_sum(float x) {
    shared[current % 32] = x;
    wait_for_all_lanes();
    float total = 0;
    for (int i = 0; i < 32; ++i) total += shared[i];
    wait_for_all_lanes();
    return total;
}
static float simd_max(float x) {
    shared[current % 32] = x;
    wait_for_all_lanes();
    float found = shared[0];
    for (int i = 1; i < 32; ++i) found = shared[i] > found ? shared[i] : found;
    wait_for_all_lanes();
    return found;
}
static float simd_shuffle(float x, ushort lane) {
    shared[current % 32] = x;
    wait_for_all_lanes();
    const float other = shared[lane];
    wait_for_all_lanes();
    return other;
}
static void stand_at(unsigned x, unsigned y, unsigned z, unsigned y_together) {
    thread_position_in_threadgroup = {x, y % y_together, 0};
    thread_position_in_grid = {x, y, z};
}
"""
CUDA = """
#define __shared__ static
#define __syncthreads() wait_for_block()
static Place threadIdx, blockIdx, blockDim;
static float __shfl_xor_sync(unsigned, float x, int step) {
    shared[current % 32] = x;
    wait_for_all_lanes();
    const float other = shared[current % 32 ^ step];
    wait_for_all_lanes();
    return other;
}
static float __shfl_sync(unsigned, float x, int lane) {
    shared[current % 32] = x;
    wait_for_all_lanes();
    const float other = shared[lane];
    wait_for_all_lanes();
    return other;
}
static void stand_at(unsigned x, unsigned y, unsigned z, unsigned y_together) {
    threadIdx = {x, y % y_together, 0};
    blockIdx = {0, y / y_together, z};
    blockDim = {32, y_together, 1};
}
"""
LANGUAGES = {"Metal": (METAL, gpu_kernels._METAL), "CUDA": (CUDA, gpu_kernels._CUDA)}
TYPES = {mx.float32: "float", mx.int32: "int", mx.uint32: "uint32_t", mx.bfloat16: "bfloat"}


class CppKernel:
    """Takes what MLX's kernel objects take, and runs the body on the CPU."""

    def __init__(self, folder: Path, kernel: GpuKernel, language: str) -> None:
        self.folder, self.kernel, self.language = folder, kernel, language
        self.calls: list[dict[str, Any]] = []

    def __call__(self, inputs: list[mx.array], template: Any, **call: Any) -> list[mx.array]:
        self.calls.append(call)
        _, num_y, num_z = call["grid"]
        y_together = call["threadgroup"][1]
        assert num_y % y_together == 0  # CUDA would run over the end
        strided = self.kernel.strided
        arrays = [
            _memory_of(x) if name in self.kernel.in_place else _laid_out(x, with_gaps=name in strided)
            for name, x in zip(self.kernel.inputs, inputs, strict=True)
        ]
        shapes = [_eight(x.shape, np.int32) for x in inputs]
        strides = [_eight([num // x.itemsize for num in x.strides], np.int64) for x in arrays]
        outputs = list(zip(call["output_shapes"], call["output_dtypes"], strict=True))
        results = [np.full(shape, 0xA5, np.uint8) for shape in ((*s, d.size) for s, d in outputs)]
        pointers = [x.ctypes.data_as(ctypes.c_void_p) for x in (*arrays, *shapes, *strides, *results)]
        _compiled(self._source(dict(template)), self.folder)(*pointers, num_y, num_z, y_together)
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
        arguments += [f"const Shape* p_{name}_shape" for name in kernel.inputs]
        arguments += [f"const Strides* p_{name}_strides" for name in kernel.inputs]
        arguments += [f"{name.upper()}_TYPE* {name}" for name in kernel.outputs]
        own, start = LANGUAGES[self.language]
        layouts = "".join(
            f"const {kind} {name}_{what} = *p_{name}_{what};\n"
            for name in kernel.inputs
            for kind, what in (("Shape", "shape"), ("Strides", "strides"))
            if f"{name}_{what}" in kernel.body
        )
        return f"""{START}{own}{constants}
        extern "C" void run({", ".join(arguments)}, int num_y, int num_z, int y_together) {{
            {layouts}
            run_lanes(32 * y_together, [=] {{
                for (int z_of_grid = 0; z_of_grid < num_z; ++z_of_grid)
                for (int first_y = 0; first_y < num_y; first_y += y_together) {{
                    stand_at(current % 32, first_y + current / 32, z_of_grid, y_together);
                    {{ {start}{kernel.body} }}
                    wait_for_block();  // the next block may use the same shared memory
                }}
            }});
        }}"""


class CppKernels:
    """Stand in for what `gpu_kernels.compiled` makes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.language = "Metal"
        self.made: dict[str, CppKernel] = {}

    def __call__(self, kernel: GpuKernel) -> CppKernel:
        if kernel.name not in self.made:
            self.made[kernel.name] = CppKernel(self.folder, kernel, self.language)
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


def _memory_of(x: mx.array) -> np.ndarray:
    """The array's own numbers: what is written there, the array has."""
    return np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x, copy=False)


def _laid_out(x: mx.array, with_gaps: bool) -> np.ndarray:
    """The numbers of an array; with gaps, as a part of a larger one whose other numbers are none."""
    numbers = np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)
    if not with_gaps:
        return np.ascontiguousarray(numbers)
    none = 0x7FFF if x.dtype == mx.bfloat16 else np.nan if x.dtype == mx.float32 else -1
    whole = np.full((*x.shape[:-1], x.shape[-1] + 3), none, numbers.dtype)
    part = whole[..., : x.shape[-1]]
    part[:] = numbers
    return part


def _eight(numbers: Sequence[int], dtype: Any) -> np.ndarray:
    """As many as MLX has room for."""
    return np.array([*numbers, *[-1] * (8 - len(numbers))], dtype)


def _array_of(result: np.ndarray, dtype: mx.Dtype) -> mx.array:
    return mx.array(result).view(dtype)[..., 0]


@cache
def _compiled(source: str, folder: Path) -> Any:
    file = folder / f"kernel{len(list(folder.glob('*.cpp')))}.cpp"  # a library is loaded once by its name
    file.write_text(source)
    library = file.with_suffix(".so")
    # The headers of C++ would take as long as the kernel: those of C are enough.
    command = ["g++", "-std=c++20", "-nostdinc++", "-O1", "-shared", "-fPIC", str(file), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library)).run
