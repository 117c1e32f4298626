"""Matmuls on x86-64 Linux, in front of a BLAS: compiled at first use, checked, loaded.

A BLAS packs the weights into another order before it multiplies them. For few tokens the packing takes longer
than the matmul. `native/sgemm.c` reads the weights once, in the order in which they are stored. All matmuls
of SmolLM2-135M (538 MB of weights), in ms, on two cores of an EPYC, which read 22 GB/s alone and 33 GB/s
together, and compute 231 GFLOP/s:

    tokens                  1     2     4     8    16    32    64
    1 thread   OpenBLAS    55    63    69    76    98   138   221
               ours        24    24    25    26    47    86   164
    2 threads  OpenBLAS    37    40    42    44    57    77   123
               ours        16    16    17    16    23    44    84

Attention weights times values (x @ v) are computed here too, for any number of tokens. A BLAS may cut their
sums at places that depend on the tokens and cells of a pass. In ms, for weights [tokens, 6000]:

                               1 thread, AVX-512            1 thread, AVX2
    tokens                     1     4    27   512          1     4    27   512
    64 columns   OpenBLAS   0.02  0.06  0.16   1.8       0.07  0.06  0.26   3.4
                 ours       0.02  0.02  0.08   1.5       0.02  0.05  0.18   3.1
    512 columns  OpenBLAS   0.62  0.56  1.32  13.9       0.53  0.43  1.97  25.4
                 ours       0.17  0.15  0.71  14.3       0.24  0.46  1.48  25.9

A token's result is bit-identical whatever tokens are beside it and whatever the number of threads. x @ w.T of
more tokens, and everything else, is passed on to the BLAS. With `OUTRIDER_KERNEL=off` all matmuls are. Its
other values (cpu/kernel_switch.py) choose the instructions.

Nothing here may import mlx: cpu/blas.py has to run first.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from outrider.cpu.kernel_switch import SWITCH, wanted_instructions
from outrider.cpu.library_cache import Recipe, Unusable, failure_of, load_cached
from outrider.cpu.matmul_check import NO_TRANSPOSE, TRANSPOSE, sgemm_is_correct

log = logging.getLogger("outrider.cpu.blas")

SOURCE_NAMES = ("sgemm.c", "sgemm_tile.h", "sgemm_columns.h", "sgemm_undefine.h", "late_helper.h")
SOURCES = tuple(Path(__file__).parent / "native" / name for name in SOURCE_NAMES)
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden", "-w")  # for any x86-64
MAX_TOKENS = 512  # of x @ w.T: with more tokens OpenBLAS is as fast (measured on the EPYC above)
FORMS = {  # of native/sgemm.c
    "": "",
    "avx512amx": "avx512",
    "avx512vnni": "avx512",
    "avxvnni": "avx2",
    "avx2": "avx2",
}


@dataclass(frozen=True)
class SgemmKernel:
    """The loaded library of native/sgemm.c."""

    path: str
    instructions: str  # "avx512" or "avx2"
    set_num_threads: Callable[[int], object]

    def __str__(self) -> str:
        return f"own {self.instructions} matmul up to {MAX_TOKENS} tokens"


def install(blas: ctypes.CDLL) -> SgemmKernel:
    """Put the matmul in front of this library's `cblas_sgemm`. Raises Unusable or OSError if that fails."""
    wanted = wanted_instructions()
    if platform.machine() != "x86_64":
        raise Unusable(f"not for {platform.machine()}")
    if wanted not in FORMS:
        raise Unusable(f"{SWITCH}={wanted}, and there is no {wanted} form")
    kernel, _is_cached = load_cached(Recipe(_stem(), _compile), partial(_open, blas, FORMS[wanted]))
    return kernel


def _open(blas: ctypes.CDLL, wanted: str, path: str) -> SgemmKernel:
    library = ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL)
    instructions = start(library, blas, wanted)
    if not all(sgemm_is_correct(library, form) for form in (NO_TRANSPOSE, TRANSPOSE)):
        raise Unusable(f"{path} computes wrong products")
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    return SgemmKernel(path, instructions, library.outrider_sgemm_set_num_threads)


def start(library: ctypes.CDLL, blas: ctypes.CDLL, instructions: str = "") -> str:
    """Give the library its BLAS. `instructions` "" chooses the best that the CPU has; returns the choice."""
    library.outrider_sgemm_start.restype = ctypes.c_char_p
    fallback = ctypes.cast(blas.cblas_sgemm, ctypes.c_void_p)
    found = library.outrider_sgemm_start(instructions.encode(), fallback, MAX_TOKENS)
    if found is None:
        missing = f"no {instructions} ({SWITCH})" if instructions else "neither AVX-512 nor AVX2"
        raise Unusable(f"this CPU has {missing}")
    return str(found.decode())


# Compiling --------------------------------------------------------------------------------------------------


def _stem() -> str:
    digest = hashlib.sha256(repr(FLAGS).encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    return f"libsgemm-{digest.hexdigest()[:12]}"


def _compile(library: Path) -> None:
    """Use the first compiler that works. One that takes too long ends the search (Unusable)."""
    failures = []
    for compiler in filter(None, map(shutil.which, COMPILERS)):
        failure = failure_of([compiler, *FLAGS, "-o", str(library), str(SOURCES[0])])
        if not failure and library.is_file():
            return
        failures.append(f"{compiler} {failure or 'wrote no library'}")
    raise Unusable("; ".join(failures) or f"no C compiler ({', '.join(COMPILERS)})")
