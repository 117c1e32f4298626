"""The kernels of models/cuda_qmm.py and cuda_attention.py without a GPU: C++ in the place of PTX."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import pytest
from recurrent.cpp_kernels import CppKernels

from outrider import gpu_kernels
from outrider.gpu_kernels import GpuKernel
from outrider.models import cuda_qmm
from outrider.models.tensor_cores import MULTIPLY

# What CUDA brings along, and the tensor cores' product: every lane shows the others what it holds.
PRODUCT = """
    struct uint4 { uint32_t x, y, z, w; };
    auto __byte_perm = [](uint32_t x, uint32_t y, uint32_t places) {
        const uint64_t bytes = (uint64_t(y) << 32) | x;
        uint32_t found = 0;
        for (int i = 0; i < 4; ++i) {
            const int place = (places >> (4 * i)) & 7;
            found |= uint32_t((bytes >> (8 * place)) & 255) << (8 * i);
        }
        return found;
    };
    auto __uint_as_float = [](uint32_t x) { float y; memcpy(&y, &x, 4); return y; };
    auto __float_as_uint = [](float x) { uint32_t y; memcpy(&y, &x, 4); return y; };
    auto product = [&](uint32_t x, uint32_t y) {  // of two pairs
        return __uint_as_float(x << 16) * __uint_as_float(y << 16)
            + __uint_as_float(x & 0xffff0000) * __uint_as_float(y & 0xffff0000);
    };
    auto multiply = [&](float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        static uint32_t held[32][6];
        const uint32_t own[6] = {a[0], a[1], a[2], a[3], b0, b1};
        memcpy(held[lane], own, sizeof(own));
        wait_for_all_lanes();
        for (int i = 0; i < 4; ++i)
            for (int q = 0; q < 4; ++q) {
                const uint32_t* x = held[lane / 4 * 4 + q] + i / 2;
                const uint32_t* y = held[(lane % 4 * 2 + i % 2) * 4 + q] + 4;
                sums[i] += product(x[0], y[0]) + product(x[2], y[1]);
            }
        wait_for_all_lanes();
    };
"""
CPP = (
    PRODUCT
    + """
    alignas(16) static unsigned char memory[1 << 20];
    #define __syncwarp() wait_for_all_lanes()
    auto start_copy = [](void* to, const void* from) { memcpy(to, from, 16); };
    auto start_copy_of_factors = [](void* to, const void* from) { memcpy(to, from, 2 * GROUPS); };
    auto end_of_copies = []() {};
    auto wait_for_oldest_copies = []() { wait_for_all_lanes(); };
"""
)


def attention_in_cpp(pair: tuple[GpuKernel, GpuKernel]) -> tuple[GpuKernel, ...]:
    return tuple(replace(one, body=one.body.replace(MULTIPLY, PRODUCT)) for one in pair)


def in_cpp(variant: cuda_qmm.Variant) -> cuda_qmm.Variant:
    kernel = variant.kernel
    return replace(variant, kernel=replace(kernel, body=kernel.body.replace(cuda_qmm._PTX, CPP)))


@pytest.fixture
def on_cpu(kernels: CppKernels, monkeypatch: pytest.MonkeyPatch) -> Iterator[CppKernels]:
    kernels.language = "CUDA"
    monkeypatch.setattr(cuda_qmm, "DENSE", tuple(in_cpp(variant) for variant in cuda_qmm.DENSE))
    monkeypatch.setattr(cuda_qmm, "GATHERED", in_cpp(cuda_qmm.GATHERED))
    monkeypatch.setattr(gpu_kernels, "is_available", lambda: True)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    forget = cuda_qmm._agrees.cache_clear
    forget()
    yield kernels
    forget()
