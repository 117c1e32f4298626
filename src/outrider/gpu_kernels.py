"""Launches GPU kernels that are written once for Metal and CUDA.

A kernel is a C++ function body for groups of 32 lanes (a SIMD group on Metal, a warp on CUDA). It may use

    lane, group_y, group_z       the position in the grid (32, groups, groups)
    EXP, EXP2, LOG, SQRT, FMA    float32 functions
    GROUP_SUM(x), GROUP_MAX(x)   over the lanes of a group; every lane has to call it
    SHUFFLE(x, i)                the x of lane i; likewise
    SHARED, BARRIER()            memory of all groups of a block; all of them have arrived
    DEVICE                       the address space of inputs and outputs, for pointers to them
    VECTOR(type, pointer)        a value of another type at an address in an input; the address is aligned
    x_shape[i], x_strides[i]     shape and strides of an input x
    X_TYPE                       the element type of an array x, input or output
"""

from __future__ import annotations

import logging
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from outrider import fallbacks, mlx_settings

log = logging.getLogger(__name__)

INSTEAD = "slower MLX operations"
LANES = 32  # threads of a SIMD group (Metal) or warp (CUDA)

_METAL = """
    const int lane = thread_position_in_threadgroup.x;
    const int group_y = thread_position_in_grid.y;
    const int group_z = thread_position_in_grid.z;
    #define EXP(x) metal::exp(x)
    #define EXP2(x) metal::exp2(x)
    #define LOG(x) metal::log(x)
    #define SQRT(x) metal::sqrt(x)
    #define FMA(x, y, z) metal::fma(x, y, z)
    #define GROUP_SUM(x) simd_sum(x)
    #define GROUP_MAX(x) simd_max(x)
    #define SHUFFLE(x, i) simd_shuffle(x, (ushort)(i))
    #define SHARED threadgroup
    #define DEVICE device
    #define BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup)
    #define VECTOR(type, pointer) (*(const device type*)(pointer))
"""
_CUDA = """
    const int lane = threadIdx.x;
    const int group_y = blockIdx.y * blockDim.y + threadIdx.y;
    const int group_z = blockIdx.z;
    #define EXP(x) expf(x)
    #define EXP2(x) exp2f(x)
    #define LOG(x) logf(x)
    #define SQRT(x) sqrtf(x)
    #define FMA(x, y, z) fmaf(x, y, z)
    auto group_sum = [](float x) {
        for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
        return x;
    };
    #define GROUP_SUM(x) group_sum(x)
    auto group_max = [](float x) {
        for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, step));
        return x;
    };
    #define GROUP_MAX(x) group_max(x)
    #define SHUFFLE(x, i) __shfl_sync(0xffffffff, x, i)
    #define SHARED __shared__
    #define DEVICE
    #define BARRIER() __syncthreads()
    #define VECTOR(type, pointer) (*(const type*)(pointer))
"""


@dataclass(frozen=True)
class GpuKernel:
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    strided: tuple[str, ...] = ()  # inputs that the body reads by their strides; the others are contiguous
    contiguous: tuple[str, ...] = ()  # inputs that are contiguous as they come: outputs of other kernels
    in_place: tuple[str, ...] = ()  # inputs that the body writes; contiguous as they come: see `write`
    groups_per_block: int = 4  # groups of lanes in a threadgroup (Metal) or block (CUDA); chosen by hand
    shared_bytes: int = 0  # dynamic shared memory of a block (CUDA only)


def is_available() -> bool:
    """True if the default device is a GPU with Metal or CUDA."""
    is_gpu = mx.default_device() == mx.Device(mx.gpu)
    return is_gpu and (mx.metal.is_available() or mx.cuda.is_available())


def runs_in_order() -> bool:
    """True if kernels run one after the other, in the order in which MLX launches them: on CUDA, unless MLX
    collects them in graphs. Only then may a kernel write into one of its inputs (`write`)."""
    return mx.cuda.is_available() and not mlx_settings.has_cuda_graphs()


def run(
    kernel: GpuKernel,
    inputs: Sequence[mx.array],
    sizes: Mapping[str, int | mx.Dtype],
    groups: tuple[int, int],
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
) -> list[mx.array]:
    """Launch groups[0] x groups[1] groups of lanes; `sizes` are constants and types of the body.

    The types of all arrays are constants too: MLX caches a compiled kernel by its name and its constants.
    """
    dtypes = [x.dtype for x in inputs] + [dtype for _, dtype in outputs]
    names = [f"{name.upper()}_TYPE" for name in (*kernel.inputs, *kernel.outputs)]
    if kernel.strided:  # MLX makes either all inputs of a kernel contiguous or none
        # `mx.contiguous` also copies arrays whose buffer is larger than they are, which is chance.
        inputs = [
            x if name in (*kernel.strided, *kernel.contiguous, *kernel.in_place) else mx.contiguous(x)
            for name, x in zip(kernel.inputs, inputs, strict=True)
        ]
    results: list[mx.array] = compiled(kernel)(
        inputs=list(inputs),
        template=[*sizes.items(), *zip(names, dtypes, strict=True)],
        grid=(LANES, *groups),
        threadgroup=(LANES, math.gcd(kernel.groups_per_block, groups[0]), 1),
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
    )
    return results


def write(
    kernel: GpuKernel,
    inputs: Sequence[mx.array],
    sizes: Mapping[str, int | mx.Dtype],
    groups: tuple[int, int],
) -> list[mx.array]:
    """Launch a kernel that writes into its inputs `in_place`. Returns these inputs as they are afterwards.

    MLX knows nothing of such writes. So the memory is the same before and after, and the caller has to drop
    the arrays that it has given: an operation on one of them may see either state.
    """
    (done,) = run(kernel, inputs, sizes, groups, [((1,), mx.uint32)])
    named = zip(kernel.inputs, inputs, strict=True)
    return mx.depends([x for name, x in named if name in kernel.in_place], [done])


@cache
def compiled(kernel: GpuKernel) -> Any:
    make, start = (mx.fast.metal_kernel, _METAL) if mx.metal.is_available() else (mx.fast.cuda_kernel, _CUDA)
    source = shortened(start + kernel.body)
    more: dict[str, Any] = {"shared_memory": kernel.shared_bytes} if kernel.shared_bytes else {}
    return make(
        # MLX caches kernels on disk by their name, so each source needs its own name.
        name=f"outrider_{kernel.name}_{zlib.crc32(source.encode()):08x}",
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=source,
        ensure_row_contiguous=not kernel.strided,
        **more,
    )


def shortened(source: str) -> str:
    """Without comments and indentation: MLX computes a hash of the source at every launch on CUDA."""
    return re.sub(r"^[ ]+|[ ]*//.*$|\n(?=\s*\n)", "", source, flags=re.MULTILINE)


def is_close(error: Callable[[], float], what: str, tolerance: float) -> bool:
    """True if the kernels can be built and their error is at most `tolerance`. Otherwise log a warning, and
    note that they are switched off."""
    try:
        found = error()
    except (RuntimeError, ValueError) as reason:
        log.warning("The %s kernels cannot be built on this device (%s): using %s.", what, reason, INSTEAD)
        fallbacks.note(f"{what} kernels", f"they cannot be built: {reason}", INSTEAD)
        return False
    if not found <= tolerance:  # also if the error is NaN
        log.warning("The %s kernels are off by %.1e on this device: using %s.", what, found, INSTEAD)
        fallbacks.note(f"{what} kernels", f"they are off by {found:.1e}", INSTEAD)
        return False
    return True
