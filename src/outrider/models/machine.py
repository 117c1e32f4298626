"""What the machine offers: its device, and how much memory caches may take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from outrider.cpu import blas

SHARE_OF_FREE = 0.6  # of what is free once the weights are loaded
LEAST_BUDGET = 64 << 20


def device_name() -> str:
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    info = mx.device_info()
    return str(info.get("device_name") or info.get("architecture") or "gpu")


def settle() -> None:
    """Call before a model is loaded. On the CPU compiled functions gain nothing and need a C++ compiler."""
    if device_name() == "cpu":
        mx.disable_compile()
        blas.watch_threads()


def step_clock() -> Callable[[], float]:
    """What to time steps with, where others work on the machine too.

    On a CPU with one thread the process's own time tells more than the clock on the wall, which others' work
    moves; with more threads it is their sum, spinning included.
    """
    if device_name() == "cpu" and blas.report().threads == 1:
        return time.process_time
    return time.perf_counter


def outruns_host() -> bool:
    """Whether the device is done with a decode step sooner than the host has built one.

    Then passes are compiled and steps launched before the last is read. A CPU is the host itself.
    """
    return device_name() != "cpu"


def prefill_step_size() -> int:
    """Prompt tokens a step that keep running streams waiting for a fraction of a second."""
    return 128 if device_name() == "cpu" else 512


def cache_budget_bytes() -> int:
    """The default memory budget for caches; call it when the weights are loaded."""
    return max(LEAST_BUDGET, int(SHARE_OF_FREE * _free_bytes()))


def _free_bytes() -> int:
    info = mx.device_info() if mx.default_device() != mx.Device(mx.cpu) else {}
    limit = (
        info.get("max_recommended_working_set_size") or info.get("memory_size") or info.get("total_memory")
    )
    if limit:
        return max(0, int(limit) - mx.get_active_memory())
    return _available_host_bytes()


def _available_host_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_PHYS_PAGES")) // 2
