"""Checks a library's `cblas_sgemm` with a few products. All sums are small integers, so any order is exact.

Nothing here may import mlx: cpu/blas.py has to run first.
"""

from __future__ import annotations

import ctypes
from functools import cache

ROW_MAJOR, NO_TRANSPOSE, TRANSPOSE = 101, 111, 112  # CblasRowMajor, CblasNoTrans, CblasTrans

# Tokens, rows of the weights, size. The last one has more tokens than cpu/matmul.py computes for w.T.
SHAPES = ((1, 5, 7), (2, 67, 16), (7, 6, 41), (3, 1, 2053), (513, 1, 2))

Matrix = list[list[float]]


def sgemm_is_correct(library: ctypes.CDLL, w_form: int) -> bool:
    """`w_form`: TRANSPOSE for weights [rows, size] (y = x @ w.T), NO_TRANSPOSE for weights [size, rows]."""
    return all(_product(library, w_form, x, w) == y for x, w, y in _examples())


@cache
def _examples() -> list[tuple[Matrix, Matrix, Matrix]]:
    """x [tokens, size], w [rows, size] and y = x @ w.T [tokens, rows]"""
    examples = []
    for num_tokens, num_rows, size in SHAPES:
        x = [[float((t * size + k) * 7 % 11 - 5) for k in range(size)] for t in range(num_tokens)]
        w = [[float((r * size + k) * 5 % 13 - 6) for k in range(size)] for r in range(num_rows)]
        y = [[float(sum(a * b for a, b in zip(token, row, strict=True))) for row in w] for token in x]
        examples.append((x, w, y))
    return examples


def _product(library: ctypes.CDLL, w_form: int, x: Matrix, w: Matrix) -> Matrix:
    num_tokens, num_rows, size = len(x), len(w), len(w[0])
    stored = w if w_form == TRANSPOSE else [list(column) for column in zip(*w, strict=True)]
    y = (ctypes.c_float * (num_tokens * num_rows))()
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    library.cblas_sgemm(
        *(ROW_MAJOR, NO_TRANSPOSE, w_form, num_tokens, num_rows, size),
        *(one, _floats(x), size, _floats(stored), len(stored[0]), zero, y, num_rows),
    )
    return [list(y[i : i + num_rows]) for i in range(0, len(y), num_rows)]


def _floats(matrix: Matrix) -> ctypes.Array[ctypes.c_float]:
    numbers = [number for row in matrix for number in row]
    return (ctypes.c_float * len(numbers))(*numbers)
