"""Our own products of few tokens on x86-64 Linux, in front of a BLAS: compiled at first use, checked, loaded.

A BLAS copies the weights into another order before it multiplies them, which for few tokens takes longer than
the product. `native/product.c` reads them once, as they lie. All products of SmolLM2-135M (538 MB), in
ms, on two cores of an EPYC, which read 22 GB/s alone and 33 together, and compute 231 GFLOP/s:

    tokens                  1     2     4     8    16    32    64
    1 thread   OpenBLAS    55    63    69    76    98   138   221
               ours        24    24    25    26    47    86   164
    2 threads  OpenBLAS    37    40    42    44    57    77   123
               ours        16    16    17    16    23    44    84

A token's result is the same to the bit whatever is fed beside it and whatever the number of threads. More
tokens, and everything but x @ w.T, are passed on to the BLAS. `OUTRIDER_KERNEL=off` leaves it all to it.

Nothing here may import mlx: cpu/blas.py has to run first.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from outrider.cpu.library_cache import Recipe, Unusable, failure_of, load_kept
from outrider.cpu.matmul_check import AS_IT_IS, TRANSPOSED, multiplies_right

log = logging.getLogger("outrider.cpu.blas")

SOURCES = tuple(Path(__file__).parent / "native" / name for name in ("product.c", "product_tile.h"))
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden", "-w")  # for any x86-64
MOST_TOKENS = 512  # with more, OpenBLAS is as fast
SWITCH = "OUTRIDER_KERNEL"


@dataclass(frozen=True)
class Kernel:
    """The library that multiplies few tokens, once it took over."""

    path: str
    instructions: str  # "avx512" or "avx2"
    set_num_threads: Callable[[int], object]

    def __str__(self) -> str:
        return f"own {self.instructions} products up to {MOST_TOKENS} tokens"


def take_over(blas: ctypes.CDLL) -> Kernel:
    """Stand in front of this library's `cblas_sgemm`; raises Unusable or OSError where that cannot be."""
    switch = os.environ.get(SWITCH, "on").lower()
    if switch == "off":
        raise Unusable(f"{SWITCH}=off")
    if switch != "on":
        log.warning("%s=%r is neither on nor off; ignored", SWITCH, switch)
    if platform.machine() != "x86_64":
        raise Unusable(f"not for {platform.machine()}")
    kernel, _is_kept = load_kept(Recipe(_stem(), _compile), partial(_open, blas))
    return kernel


def _open(blas: ctypes.CDLL, path: str) -> Kernel:
    library = ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL)
    instructions = start(library, blas)
    if not multiplies_right(library, TRANSPOSED):
        raise Unusable(f"{path} computes wrong products")
    if not multiplies_right(library, AS_IT_IS):
        raise Unusable(f"what {path} passes on comes back wrong")
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    return Kernel(path, instructions, library.outrider_product_set_num_threads)


def start(library: ctypes.CDLL, blas: ctypes.CDLL, instructions: str = "") -> str:
    """Give the library its BLAS; the instructions are the best there are unless they are named."""
    library.outrider_product_start.restype = ctypes.c_char_p
    behind = ctypes.cast(blas.cblas_sgemm, ctypes.c_void_p)
    found = library.outrider_product_start(instructions.encode(), behind, MOST_TOKENS)
    if found is None:
        raise Unusable("this CPU has neither AVX-512 nor AVX2")
    return str(found.decode())


# Compiling --------------------------------------------------------------------------------------------------


def _stem() -> str:
    digest = hashlib.sha256(repr(FLAGS).encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    return f"libproduct-{digest.hexdigest()[:12]}"


def _compile(library: Path) -> None:
    """With the first compiler that can; one that takes too long ends it all (Unusable)."""
    failures = []
    for compiler in filter(None, map(shutil.which, COMPILERS)):
        failure = failure_of([compiler, *FLAGS, "-o", str(library), str(SOURCES[0])])
        if not failure and library.is_file():
            return
        failures.append(f"{compiler} {failure or 'wrote no library'}")
    raise Unusable("; ".join(failures) or f"no C compiler ({', '.join(COMPILERS)})")
