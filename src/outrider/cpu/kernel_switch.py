"""OUTRIDER_KERNEL: whether our own native code for CPUs is used (cpu/matmul.py, cpu/extension.py), and which.

    on                                                  the best that this CPU has (default)
    off                                                 none
    avx512amx, avx512vnni, avxvnni, avx2, portable      exactly these instructions

Nothing here may import mlx: cpu/blas.py has to run first.
"""

from __future__ import annotations

import logging
import os
from functools import cache

from outrider.cpu.library_cache import Unusable

log = logging.getLogger("outrider.cpu.blas")

SWITCH = "OUTRIDER_KERNEL"
# As native/extension/quantized.h names them, the best first.
INSTRUCTIONS = ("avx512amx", "avx512vnni", "avxvnni", "avx2", "portable")


def wanted_instructions() -> str:
    """Those that the user names; "" for the best that the CPU has. Raises Unusable if the switch is off."""
    value = os.environ.get(SWITCH, "on").lower()
    if value == "off":
        raise Unusable(f"{SWITCH}=off")
    return value if _is_name(value) else ""


@cache  # an unknown value is reported once
def _is_name(value: str) -> bool:
    if value not in ("on", *INSTRUCTIONS):
        log.warning("%s=%r is none of on, off, %s; ignored", SWITCH, value, ", ".join(INSTRUCTIONS))
    return value in INSTRUCTIONS
