"""native/sgemm.c in a library of the tests' own, and inputs for it."""

import ctypes
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.cpu import matmul
from outrider.cpu.matmul_check import NO_TRANSPOSE, ROW_MAJOR, TRANSPOSE
from patience import PATIENCE_S

HAS_COMPILER = any(map(shutil.which, matmul.COMPILERS))
WHERE_THEY_ARE = [
    pytest.mark.skipif(sys.platform != "linux", reason="Linux only: macOS has Accelerate"),
    pytest.mark.skipif(matmul.platform.machine() != "x86_64", reason="x86-64 only"),
    pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler"),
]
INSTRUCTIONS = ("avx512", "avx2")
VALUES = (ROW_MAJOR, NO_TRANSPOSE, NO_TRANSPOSE)  # the forms of x @ v

SGEMM = ctypes.CFUNCTYPE(
    None,
    *[ctypes.c_int] * 6,
    *(ctypes.c_float, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int),
    *(ctypes.c_float, ctypes.c_void_p, ctypes.c_int),
)


class Passed:
    """Stands for the BLAS behind: notes what is passed on, and computes nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.cblas_sgemm = SGEMM(lambda *arguments: self.calls.append(arguments))


class Sgemm:
    """A library of its own for these tests, so that the process's keeps its instructions and threads."""

    def __init__(self, path: Path, instructions: str) -> None:
        self.library = ctypes.CDLL(str(path))
        self.passed = Passed()
        self.instructions = matmul.start(self.library, self.passed, instructions)  # type: ignore[arg-type]

    def call(
        self,
        x: np.ndarray,
        w: np.ndarray,
        y: np.ndarray,
        num_threads: int = 1,
        beta: float = 0.0,
        alpha: float = 1.0,
        forms: tuple[int, int, int] = (ROW_MAJOR, NO_TRANSPOSE, TRANSPOSE),
    ) -> np.ndarray:
        """Rows may be apart; x and w as they lie in memory."""
        num_outputs = w.shape[1] if forms[2] == NO_TRANSPOSE else len(w)
        self.library.outrider_sgemm_set_num_threads(num_threads)
        address, apart = lambda a: ctypes.c_void_p(a.ctypes.data), lambda a: a.strides[0] // 4
        self.library.cblas_sgemm(
            *(*forms, len(x), num_outputs, x.shape[1], ctypes.c_float(alpha), address(x), apart(x)),
            *(address(w), apart(w), ctypes.c_float(beta), address(y), apart(y)),
        )
        return y

    def __call__(self, x: np.ndarray, w: np.ndarray, num_threads: int = 1) -> np.ndarray:
        """x @ w.T"""
        return self.call(x, w, np.full((len(x), len(w)), np.nan, np.float32), num_threads)

    def values(self, x: np.ndarray, v: np.ndarray, num_threads: int = 1) -> np.ndarray:
        """x @ v"""
        y = np.full((len(x), v.shape[1]), np.nan, np.float32)
        return self.call(x, v, y, num_threads, forms=VALUES)


def loaded(path: Path, instructions: str) -> Sgemm:
    """The compiled library; skips the test where the CPU lacks the instructions."""
    try:
        return Sgemm(path, instructions)
    except matmul.Unusable as reason:
        pytest.skip(str(reason))


def numbers(seed: int, rows: int, size: int, gap: int = 0) -> np.ndarray:
    """Rows with unused numbers between them, none of which may be read into a sum."""
    wide = np.full((rows, size + gap), np.nan, np.float32)
    wide[:, :size] = np.random.default_rng(seed).standard_normal((rows, size))
    return wide[:, :size]


def exit_code_of_a_child(check: Callable[[], bool]) -> int:
    """0 where the check holds in a forked process, which may crash or hang."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(PATIENCE_S))
        try:
            os._exit(0 if check() else 1)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
