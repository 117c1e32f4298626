"""The machine: its device, and how much memory the caches may use."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from outrider.cpu import blas
from outrider.models import cgroup

SHARE_OF_FREE = 0.6  # of the memory that is free after the weights are loaded; chosen by hand
MIN_BUDGET_BYTES = 64 << 20  # chosen by hand


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
        blas.watch_threads()


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


def prefill_step_size() -> int:
    """Prompt tokens in one step, so that running streams wait less than a second. Chosen by hand."""
    return 128 if is_cpu() else 512


def cache_budget_bytes() -> int:
    """The default memory budget for caches. Call after the weights are loaded."""
    return max(MIN_BUDGET_BYTES, int(SHARE_OF_FREE * _free_bytes()))


def _free_bytes() -> int:
    info = {} if is_cpu() else mx.device_info()
    limit = (
        info.get("max_recommended_working_set_size") or info.get("memory_size") or info.get("total_memory")
    )
    if limit:
        return max(0, int(limit) - mx.get_active_memory())
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
