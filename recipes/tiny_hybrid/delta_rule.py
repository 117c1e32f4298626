"""The gated delta rule over whole rows at once, for training.

mlx-lm computes a training pass token by token, which is thousands of small operations a layer. Here the
updates of all tokens of a row are one triangular system:

    state_t = g_t state_(t-1) + k_t u_t,   u_t = beta_t (v_t - g_t state_(t-1) k_t)

    (I + A) U = beta V,   A[t, i] = beta_t (k_t . k_i) g_(i+1) ... g_t   for i < t

Every row starts with an empty state. Must not know the model.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5


def train_in_parallel() -> None:
    """Let the hybrid's layers of mlx-lm compute the rule as here. For training only: no state is returned."""
    qwen3_5.gated_delta_update = parallel_update


def parallel_update(
    q: mx.array,  # [rows, T, key heads, Dk]
    k: mx.array,
    v: mx.array,  # [rows, T, value heads, Dv]
    a: mx.array,  # [rows, T, value heads]
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    use_kernel: bool = False,
) -> tuple[mx.array, None]:
    """The outputs [rows, T, value heads, Dv]. The arguments are those of mlx-lm's layers in training."""
    if state is not None or mask is not None or use_kernel:
        raise ValueError("rows are whole and start with an empty state: no state, mask or kernel is used")
    width = q.shape[1]
    repeats = v.shape[2] // k.shape[2]
    q, k = (mx.repeat(x, repeats, axis=2).swapaxes(1, 2) for x in (q, k))  # [rows, heads, T, D]
    v = v.swapaxes(1, 2)
    beta = mx.sigmoid(b).swapaxes(1, 2)[..., None]
    forgetting = mx.cumsum(-mx.exp(A_log) * nn.softplus(a + dt_bias), axis=1).swapaxes(1, 2)  # logarithms
    seen = mx.tril(mx.ones((width, width), dtype=mx.bool_))
    differences = mx.where(seen, forgetting[..., None] - forgetting[..., None, :], 0.0)
    kept = mx.where(seen, mx.exp(differences), 0.0)  # [rows, heads, T, T]
    lower = mx.tril(beta * (k @ k.swapaxes(-1, -2)) * kept, -1)
    updates = inverse(lower) @ (beta * v)
    return ((q @ k.swapaxes(-1, -2) * kept) @ updates).swapaxes(1, 2), None


def inverse(lower: mx.array) -> mx.array:
    """(I + lower)^-1 of strictly lower triangular matrices whose size is a power of two.  [..., T, T]

    Blocks on the diagonal are inverted in pairs, from single numbers up to the whole matrix:

        [ P    ]^-1   [  P^-1               ]
        [ R  Q ]    = [ -Q^-1 R P^-1   Q^-1 ]
    """
    *leading, size, _ = lower.shape
    if size & (size - 1):
        raise ValueError(f"the size {size} is not a power of two")
    blocks = mx.ones((*leading, size, 1, 1))
    while (width := blocks.shape[-1]) < size:
        pairs = size // (2 * width)
        p, q = (blocks.reshape(*leading, pairs, 2, width, width)[..., i, :, :] for i in (0, 1))
        tiled = lower.reshape(*leading, pairs, 2, width, pairs, 2, width)[..., 1, :, :, 0, :]
        each = mx.arange(pairs)
        r = tiled.swapaxes(-3, -2)[..., each, each, :, :]  # the pairs on the diagonal
        top = mx.concatenate([p, mx.zeros_like(p)], axis=-1)
        blocks = mx.concatenate([top, mx.concatenate([-(q @ r @ p), q], axis=-1)], axis=-2)
    return blocks[..., 0, :, :]
