"""Kernels for GPUs, written once for Metal and CUDA: what the two languages call differently, and launching.

A kernel is a body of C++ over groups of 32 lanes. It may use

    lane, group_y, group_z       where it is in the grid (32, groups, groups)
    EXP, LOG, SQRT, FMA          in float32
    GROUP_SUM(x)                 the sum over a group's lanes; every lane has to get there
    x_shape[i], x_strides[i]     of an input x
    X_TYPE                       the type of an array x, input or output
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

log = logging.getLogger(__name__)

LANES = 32
_GROUPS_TOGETHER = 4  # groups of lanes in a threadgroup or block

_METAL = """
    const int lane = thread_position_in_threadgroup.x;
    const int group_y = thread_position_in_grid.y;
    const int group_z = thread_position_in_grid.z;
    #define EXP(x) metal::exp(x)
    #define LOG(x) metal::log(x)
    #define SQRT(x) metal::sqrt(x)
    #define FMA(x, y, z) metal::fma(x, y, z)
    #define GROUP_SUM(x) simd_sum(x)
"""
_CUDA = """
    const int lane = threadIdx.x;
    const int group_y = blockIdx.y * blockDim.y + threadIdx.y;
    const int group_z = blockIdx.z;
    #define EXP(x) expf(x)
    #define LOG(x) logf(x)
    #define SQRT(x) sqrtf(x)
    #define FMA(x, y, z) fmaf(x, y, z)
    auto group_sum = [](float x) {
        for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
        return x;
    };
    #define GROUP_SUM(x) group_sum(x)
"""


@dataclass(frozen=True)
class Kernel:
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    strided: tuple[str, ...] = ()  # inputs that the body reads by their strides; others lie without gaps


def is_there() -> bool:
    """Whether the default device is one that runs kernels."""
    is_gpu = mx.default_device() == mx.Device(mx.gpu)
    return is_gpu and (mx.metal.is_available() or mx.cuda.is_available())


def run(
    kernel: Kernel,
    inputs: Sequence[mx.array],
    sizes: Mapping[str, int],
    groups: tuple[int, int],
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
) -> list[mx.array]:
    """Launch over groups[0] x groups[1] groups of lanes; `sizes` are constants of the body.

    Types are among what a compiled kernel is kept by: MLX keeps it by its name and constants alone.
    """
    dtypes = [x.dtype for x in inputs] + [dtype for _, dtype in outputs]
    names = [f"{name.upper()}_TYPE" for name in (*kernel.inputs, *kernel.outputs)]
    if kernel.strided:  # MLX lays out all inputs of a kernel anew where need be, or none
        inputs = [
            x if name in kernel.strided else mx.contiguous(x)
            for name, x in zip(kernel.inputs, inputs, strict=True)
        ]
    made: list[mx.array] = compiled(kernel)(
        inputs=list(inputs),
        template=[*sizes.items(), *zip(names, dtypes, strict=True)],
        grid=(LANES, *groups),
        threadgroup=(LANES, math.gcd(_GROUPS_TOGETHER, groups[0]), 1),
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
    )
    return made


@cache
def compiled(kernel: Kernel) -> Any:
    make, start = (mx.fast.metal_kernel, _METAL) if mx.metal.is_available() else (mx.fast.cuda_kernel, _CUDA)
    source = start + kernel.body
    return make(
        # MLX also finds kernels of earlier processes by their name: another source is another name.
        name=f"outrider_{kernel.name}_{zlib.crc32(source.encode()):08x}",
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=source,
        ensure_row_contiguous=not kernel.strided,
    )


def is_close(error: Callable[[], float], what: str, tolerance: float) -> bool:
    """Whether kernels can be built and are off by no more than this; if not, the log says so."""
    try:
        found = error()
    except (RuntimeError, ValueError) as reason:
        log.warning(
            "The %s kernels cannot be built on this device (%s): slower, portable form.", what, reason
        )
        return False
    if not found <= tolerance:  # or not a number
        log.warning("The %s kernels are off by %.1e on this device: slower, portable form.", what, found)
        return False
    return True
