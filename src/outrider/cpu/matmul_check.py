"""Whether a library's `cblas_sgemm` is right: a few products whose sums are whole numbers, exact in whatever
order.

Nothing here may import mlx: cpu/blas.py has to run first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

ROW_MAJOR, AS_IT_IS, TRANSPOSED = 101, 111, 112  # as CBLAS numbers them

SHAPES = ((1, 5, 7), (2, 9, 16), (7, 6, 41), (3, 1, 2053))  # tokens, rows of the weights, size


@dataclass(frozen=True)
class _Example:
    """y = x @ w.T, all in rows, one after the other."""

    shape: tuple[int, int, int]
    x: Sequence[float]  # [tokens, size]
    w: Sequence[float]  # [rows, size]
    turned: Sequence[float]  # [size, rows]
    y: Sequence[float]  # [tokens, rows]


def multiplies_right(library: ctypes.CDLL, w_form: int) -> bool:
    """With weights in rows (TRANSPOSED: it takes x @ w.T) or in columns (AS_IT_IS)."""
    return all(_product(library, w_form, example) == example.y for example in _examples())


@cache
def _examples() -> list[_Example]:
    return [_example(*shape) for shape in SHAPES]


def _example(num_tokens: int, num_rows: int, size: int) -> _Example:
    x = [float(i * 7 % 11 - 5) for i in range(num_tokens * size)]
    w = [float(i * 5 % 13 - 6) for i in range(num_rows * size)]
    rows = [w[i : i + size] for i in range(0, len(w), size)]
    y = [
        float(sum(a * b for a, b in zip(x[i : i + size], row, strict=True)))
        for i in range(0, len(x), size)
        for row in rows
    ]
    return _Example((num_tokens, num_rows, size), x, w, [row[k] for k in range(size) for row in rows], y)


def _product(library: ctypes.CDLL, w_form: int, example: _Example) -> list[float]:
    num_tokens, num_rows, size = example.shape
    w, ldw = (example.w, size) if w_form == TRANSPOSED else (example.turned, num_rows)
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    x_array, w_array = (ctypes.c_float * len(example.x))(*example.x), (ctypes.c_float * len(w))(*w)
    y_array = (ctypes.c_float * len(example.y))()
    library.cblas_sgemm(
        *(ROW_MAJOR, AS_IT_IS, w_form, num_tokens, num_rows, size),
        *(one, x_array, size, w_array, ldw, zero, y_array, num_rows),
    )
    return list(y_array)
