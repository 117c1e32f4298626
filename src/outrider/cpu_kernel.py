"""Our own products of few tokens on x86-64 Linux, in front of a BLAS: compiled at first use, checked, loaded.

A BLAS copies the weights into another order before it multiplies them, which for few tokens takes longer than
the product. `native/product.c` reads them once, as they lie. All products of SmolLM2-135M (538 MB), in
ms, on two cores of an EPYC, which read 22 GB/s alone and 29 together:

    tokens                  1     2     4     8    16    32    64   128   512
    1 thread   OpenBLAS    55    63    69    76    98   138   221   384  1354
               ours        23    23    25    28    50    88   167   331  1337
    2 threads  OpenBLAS    37    40    42    44    57    77   123   215   775
               ours        17    17    18    19    30    48    90   172   677

A token's result is the same to the bit whatever is fed beside it and whatever the number of threads. More
tokens, and everything but x @ w.T, are passed on to the BLAS. `OUTRIDER_KERNEL=off` leaves it all to it.

Nothing here may import mlx: blas.py has to run first.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from outrider.kept_libraries import Recipe, Unusable, load_kept

log = logging.getLogger("outrider.blas")

SOURCES = tuple(Path(__file__).parent / "native" / name for name in ("product.c", "product_tile.h"))
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden", "-w")  # for any x86-64
MOST_TOKENS = 512  # with more, OpenBLAS is as fast
SWITCH = "OUTRIDER_KERNEL"

ROW_MAJOR, AS_IT_IS, TRANSPOSED = 101, 111, 112  # as CBLAS numbers them


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
    check(library)
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
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise Unusable(f"no C compiler ({', '.join(COMPILERS)})")
    command = [compiler, *FLAGS, "-o", str(library), str(SOURCES[0])]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30)
    if result.returncode != 0:
        raise Unusable(f"{compiler} failed ({result.returncode}): {result.stderr.strip()[:200]}")
    if not library.is_file():
        raise Unusable(f"{compiler} wrote no library")


# Checking ---------------------------------------------------------------------------------------------------


def check(library: ctypes.CDLL) -> None:
    """A few products whose sums are whole numbers, exact in whatever order; Unusable where one is wrong."""
    for num_tokens, num_rows, size in ((1, 5, 7), (2, 9, 16), (7, 6, 41), (3, 1, 2053)):
        x = [float(i * 7 % 11 - 5) for i in range(num_tokens * size)]
        w = [float(i * 5 % 13 - 6) for i in range(num_rows * size)]
        tokens, rows = _rows(x, size), _rows(w, size)
        wanted = [
            float(sum(a * b for a, b in zip(token, row, strict=True))) for token in tokens for row in rows
        ]
        turned = [row[k] for k in range(size) for row in rows]
        if _sgemm(library, TRANSPOSED, x, w, (num_tokens, num_rows, size)) != wanted:
            raise Unusable("it computes wrong products")
        if _sgemm(library, AS_IT_IS, x, turned, (num_tokens, num_rows, size)) != wanted:
            raise Unusable("what it passes on comes back wrong")


def _rows(values: Sequence[float], size: int) -> list[Sequence[float]]:
    return [values[i : i + size] for i in range(0, len(values), size)]


def _sgemm(
    library: ctypes.CDLL, w_form: int, x: Sequence[float], w: Sequence[float], shape: tuple[int, int, int]
) -> list[float]:
    num_tokens, num_rows, size = shape
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    x_array, w_array = (ctypes.c_float * len(x))(*x), (ctypes.c_float * len(w))(*w)
    y_array = (ctypes.c_float * (num_tokens * num_rows))()
    ldw = size if w_form == TRANSPOSED else num_rows
    library.cblas_sgemm(
        *(ROW_MAJOR, AS_IT_IS, w_form, num_tokens, num_rows, size),
        *(one, x_array, size, w_array, ldw, zero, y_array, num_rows),
    )
    return list(y_array)
