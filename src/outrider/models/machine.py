"""The machine: its device, and how much memory is free."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from outrider import fallbacks
from outrider.cpu import blas
from outrider.models import cgroup


def is_cpu() -> bool:
    return bool(mx.default_device() == mx.Device(mx.cpu))


def device_name() -> str:
    if is_cpu():
        return "cpu"
    info = mx.device_info()
    return str(info.get("device_name") or info.get("architecture") or "gpu")


def settle() -> None:
    """Call before a model is loaded. On the CPU, mx.compile gains nothing and needs a C++ compiler."""
    if is_cpu():
        mx.disable_compile()
        _note_blas(blas.watch_threads())


def has_own_matmul() -> bool:
    """True if the matmul for few tokens (cpu/matmul.py) is made for this device."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and is_cpu()


def _note_blas(report: blas.BlasReport) -> None:
    if sys.platform == "linux" and not report.active:
        fallbacks.note("BLAS", report.reason, f"{report.name}: float32 matmuls are slow")
    elif has_own_matmul() and not report.kernel:
        fallbacks.note("own matmul", report.no_kernel, report.name)


def step_clock() -> Callable[[], float]:
    """The clock for measuring steps.

    On a CPU with one thread, the CPU time of the process does not depend on the load of other processes. With
    several threads it would add up their times, including the time that they spin.
    """
    if is_cpu() and blas.report().threads == 1:
        return time.process_time
    return time.perf_counter


def outruns_host() -> bool:
    """True if the device computes a decode step faster than the host builds one: on GPUs.

    Then passes are compiled, and a step is launched before the previous one is read.
    """
    return not is_cpu()


def held_bytes() -> dict[str, int]:
    """Memory that MLX holds: for arrays, and for buffers that it will use again. For any thread."""
    return {"arrays": int(mx.get_active_memory()), "buffers": int(mx.get_cache_memory())}


def limit_buffers(num_bytes: int) -> None:
    """The most bytes of buffers that MLX keeps to use them again. By default there is hardly a limit."""
    mx.set_cache_limit(num_bytes)


def release_buffers() -> None:
    """Give the buffers that MLX keeps, and the free memory of the process, back to the system."""
    mx.clear_cache()
    if platform.libc_ver()[0] == "glibc":  # keeps small pieces that were freed
        ctypes.CDLL(None).malloc_trim(0)


def extra_bytes(run: Callable[[], object]) -> int:
    """The most memory that a function takes while it runs, in addition to what is held before."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    return max(0, int(mx.get_peak_memory()) - int(before))


def free_bytes() -> int:
    """Memory that is free: of the device, or of the machine or its container."""
    info = {} if is_cpu() else mx.device_info()
    limit = (
        info.get("max_recommended_working_set_size") or info.get("memory_size") or info.get("total_memory")
    )
    if limit:
        left = int(limit) - int(mx.get_active_memory())
        if "free_memory" in info:  # CUDA: other processes use the device too
            left = min(left, int(info["free_memory"]) + int(mx.get_cache_memory()))
        return max(0, left)
    return _available_host_bytes()


def _available_host_bytes() -> int:
    """Free memory of the machine, or of the container if that is less."""
    in_container = cgroup.free_bytes()
    on_machine = _available_machine_bytes()
    return on_machine if in_container is None else min(on_machine, in_container)


def _available_machine_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_PHYS_PAGES")) // 2
