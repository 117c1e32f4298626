"""Settings of a serving process as a whole: how its threads take turns, and how memory is given back."""

from __future__ import annotations

import ctypes
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
