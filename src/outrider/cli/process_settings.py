"""Settings of a process as a whole: how its threads take turns, and how memory is freed."""

from __future__ import annotations

import ctypes
import gc
import platform
import sys

# How long a thread that computes in Python keeps the others waiting (Python's default: 0.005). The event loop
# waits several times until it has answered a request, so that short answers took 50 ms beside a busy engine.
SWITCH_S = 0.001
# Larger pieces of memory are mapped by themselves, and given back to the system when they are freed. By
# default glibc raises this to 32 MiB once it has seen such a piece: then large bodies leave holes in the
# heap, which grew by hundreds of megabytes in minutes.
MAPPED_BYTES = 1 << 20

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def settle_process() -> None:
    sys.setswitchinterval(SWITCH_S)
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)


def collect_garbage_less_often() -> None:
    """Called when the first models are loaded. A collection stops all threads.

    Measured, with Python's defaults: to validate a request of 90,000 parts took 380 ms, and the collector 270
    ms of it.
    """
    gc.collect()
    gc.freeze()  # what is loaded now stays, so collections need not look at it
    gc.set_threshold(10_000, 10, 10)  # Python 3.11: 700, 10, 10. Above 10,000 the time stays the same
