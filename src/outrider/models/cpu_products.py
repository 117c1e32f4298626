"""Products of a few tokens with a layer's weights, cut so that OpenBLAS need not copy the weights first.

Below a size OpenBLAS multiplies in place; above it, it packs both matrices, which for a few tokens takes as
long as the product. So the weights are taken in pieces of rows that stay below. On one EPYC core, in us:

    tokens                   1     2     4     8    16
    [1536, 576]   whole    440   410   444   511   653
                  pieces   270   284   321   419   550
    [49152, 576]  whole  15700 15190 16640 18750 23430
                  pieces  7190  9300

Pieces are computed by one thread: where two have free cores, that is no slower for up to 4 tokens; where more
have, the whole product is left to them. What is cut depends on shapes and the machine, never on the load; and
as long as a product is cut, a token's result does not depend on its neighbours, to the bit.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import mlx.nn as nn

from outrider import blas
from outrider.models.cpu_math import applies

MOST_IN_PLACE = 660_000  # multiplications of a product that is computed in place
LEAST_ROWS, ROWS_STEP = 32, 16
MOST_TOKENS = {1: 16, 2: 4}  # by the threads that a product may have
CORES = ("SkylakeX", "Cooperlake", "SapphireRapids")  # those that OpenBLAS has such kernels for


def most_tokens() -> int:
    """For how many tokens a product is cut on this machine; 0: for none."""
    found = blas.report()
    if not found.active or not found.name.endswith(CORES) or not applies():
        return 0
    return MOST_TOKENS.get(found.threads or 0, 0)


@cache
def rows_in_piece(num_tokens: int, num_rows: int, size: int) -> int | None:
    """Rows of a [num_rows, size] matrix to multiply at once; None: all, since they fit or are too long."""
    if num_tokens * num_rows * size <= MOST_IN_PLACE:
        return None
    most = MOST_IN_PLACE // (num_tokens * size)
    fitting = range(most - most % ROWS_STEP, LEAST_ROWS - 1, -ROWS_STEP)
    without_rest = (rows for rows in fitting if num_rows % rows == 0)
    return next(without_rest, fitting[0] if fitting else None)


def product(x: mx.array, weight: mx.array) -> mx.array:
    """x @ weight.T  [..., size], [rows, size] -> [..., rows]"""
    num_rows, size = weight.shape
    num_tokens = x.size // size
    few = 0 < num_tokens <= most_tokens() and x.dtype == weight.dtype == mx.float32
    rows = rows_in_piece(num_tokens, num_rows, size) if few else None
    if rows is None:
        return x @ weight.T
    num_cut = num_rows - num_rows % rows
    tokens = x.reshape(num_tokens, size)
    pieces = weight[:num_cut].reshape(-1, rows, size).swapaxes(1, 2)
    found = (tokens[None] @ pieces).swapaxes(0, 1).reshape(num_tokens, num_cut)
    if num_cut < num_rows:
        found = mx.concatenate([found, tokens @ weight[num_cut:].T], axis=-1)
    return found.reshape(*x.shape[:-1], num_rows)


class CutLinear(nn.Linear):
    def __call__(self, x: mx.array) -> mx.array:
        found = product(x, self.weight)
        return found + self.bias if "bias" in self else found


class CutEmbedding(nn.Embedding):
    def as_linear(self, x: mx.array) -> mx.array:
        return product(x, self.weight)
