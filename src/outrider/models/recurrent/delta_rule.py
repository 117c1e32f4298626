"""The gated delta rule in its chunked form: over a window or a prompt, without a loop over tokens.

    d_t = b_t (v_t - S_(t-1) G_t k_t)          S_t = S_(t-1) G_t + d_t k_t^T          y_t = S_t q_t

G_t is a gate: one number for each head, or one for each key dimension of a head. Let S be the state before a
chunk. Then S_t = S G_1..G_t + sum_(i<=t) d_i k_i^T G_(i+1)..G_t. So the deltas d solve one triangular system
(I + A) d = b (v - S G_1..G_t k), and the outputs and the state after any number of tokens are small sums over
d. A window of drafts therefore stores d and k, not a state for every position: `ChunkUpdate.state_after`
computes the state that each row commits.

Padding tokens have b = 0 and log G = 0, so they do not change the state.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

CHUNK = 32  # tokens; chosen by hand
CHUNK_BY_DIMENSION = 16  # tokens, with a gate for each key dimension: matmuls cost CHUNK times more
_BASE = 8  # triangular blocks up to this size are inverted by a short product, whose terms cannot grow large


@dataclass(frozen=True)
class ChunkUpdate:
    """How a chunk of tokens changes the state: enough to compute the state after any number of the tokens."""

    state: mx.array  # [rows, heads, value_dim, key_dim] before the chunk, float32
    keys: mx.array  # [rows, heads, tokens, key_dim]
    deltas: mx.array  # [rows, heads, tokens, value_dim]
    decay: mx.array  # [rows, heads, tokens, 1 or key_dim] decay of `state` up to each token
    since: mx.array  # [rows, heads, tokens, tokens, 1 or key_dim] decay from an earlier token to a later one
    offset: int = 0  # number of tokens of the pass before this chunk

    def state_after(self, num_tokens: mx.array) -> mx.array:
        """The rows' states after the first `num_tokens` [rows] tokens of the pass."""
        num = mx.maximum(num_tokens - self.offset, 0)[:, None, None, None]
        last = mx.maximum(num - 1, 0)
        decay = mx.where(num > 0, mx.take_along_axis(self.decay, last, axis=2), 1)
        since = mx.take_along_axis(self.since, last[..., None], axis=2)[:, :, 0]
        return self._state(decay, mx.where(num > 0, since, 0))

    def state_after_all(self) -> mx.array:
        return self._state(self.decay[:, :, -1:], self.since[:, :, -1])

    def _state(self, decay: mx.array, since: mx.array) -> mx.array:
        return decay * self.state + self.deltas.swapaxes(-1, -2) @ (self.keys * since)


def chunk_delta_rule(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    log_gates: mx.array,
    betas: mx.array,
    state: mx.array,
    chunk: int | None = None,
) -> tuple[mx.array, ChunkUpdate]:
    """Outputs [rows, tokens, heads, value_dim], and how the last chunk changes the state.

    queries, keys [rows, tokens, key_heads, key_dim], one key head for each group of heads; values
    [rows, tokens, heads, value_dim]; log_gates [rows, tokens, heads] or [rows, tokens, heads, key_dim];
    betas [rows, tokens, heads]; state [rows, heads, value_dim, key_dim].
    """
    num_tokens = values.shape[1]
    by_dimension = log_gates.ndim == 4
    size = min(chunk or (CHUNK_BY_DIMENSION if by_dimension else CHUNK), num_tokens)
    repeats = values.shape[2] // keys.shape[2]
    q, k, v = (by_heads(x, size) for x in (queries, keys, values))  # [rows, heads, chunks, size, dim]
    beta = by_heads(betas[..., None], size)
    decay, since = decays(by_heads(log_gates if by_dimension else log_gates[..., None], size))
    overlaps, reads = decayed_products(k, k, since, repeats), decayed_products(q, k, since, repeats)
    solved = _unit_lower_inverse(mx.tril(beta * overlaps, -1))
    q, k = repeated(q, repeats), repeated(k, repeats)
    deltas_from_zero = solved @ (beta * v)  # the deltas if the state were zero
    state_weights = solved @ (beta * decay * k)  # how the state enters the deltas
    decayed_q = decay * q
    outputs = []
    for i in range(v.shape[2]):
        transposed = state.swapaxes(-1, -2)
        deltas = deltas_from_zero[:, :, i] - state_weights[:, :, i] @ transposed
        outputs.append(decayed_q[:, :, i] @ transposed + reads[:, :, i] @ deltas)
        last = ChunkUpdate(state, k[:, :, i], deltas, decay[:, :, i], since[:, :, i], i * size)
        state = last.state_after_all()  # lazy: never computed for the last chunk
    out = mx.concatenate(outputs, axis=2)
    return out[:, :, :num_tokens].swapaxes(1, 2), last


def by_heads(x: mx.array, size: int) -> mx.array:
    """[rows, tokens, heads, dim] -> [rows, heads, chunks, size, dim] in float32, padded with zeros."""
    x = x.swapaxes(1, 2).astype(mx.float32)
    missing = -x.shape[2] % size
    if missing:
        x = mx.pad(x, [(0, 0), (0, 0), (0, missing), (0, 0)])
    return x.reshape(*x.shape[:2], -1, size, x.shape[-1])


def repeated(x: mx.array, repeats: int) -> mx.array:
    """Repeat each key head for all heads of its group."""
    return mx.repeat(x, repeats, axis=1) if repeats > 1 else x


def decays(log_gates: mx.array) -> tuple[mx.array, mx.array]:
    """The decay at token t of the state before the chunk, and of the update of token i.

    [..., size, dim] -> [..., size, dim] and [..., size (t), size (i), dim], 0 where i > t. The logs between
    two tokens are summed directly, not computed as a difference of two sums: a gate of 0 (log -inf) would
    make the difference NaN.
    """
    size = log_gates.shape[-2]
    after = mx.tril(mx.ones((size, size), mx.bool_), -1)[..., None]
    between = mx.cumsum(mx.where(after, log_gates[..., None, :], 0), axis=-3)
    not_before = mx.tril(mx.ones((size, size), mx.bool_))[..., None]
    return mx.exp(mx.cumsum(log_gates, axis=-2)), mx.where(not_before, mx.exp(between), 0)


def decayed_products(left: mx.array, right: mx.array, since: mx.array, repeats: int) -> mx.array:
    """The sum over dimensions of left_t right_i since_(t, i).  [..., size, size]"""
    if since.shape[-1] == 1:
        return repeated(left @ right.swapaxes(-1, -2), repeats) * since[..., 0]
    left, right = repeated(left, repeats), repeated(right, repeats)
    return ((since * right[..., None, :, :]) @ left[..., None])[..., 0]


def _unit_lower_inverse(strict: mx.array) -> mx.array:
    """(I + A)^-1 for strictly lower triangular A [..., n, n], in blocks whose size doubles.

    Small blocks: (I - A)(I + A^2)(I + A^4), since A^8 = 0. For blocks B and D on the diagonal and C below B
    the inverse is [[B^-1, 0], [-D^-1 C B^-1, D^-1]].
    """
    size = strict.shape[-1]
    if size == 1:
        return mx.ones_like(strict)
    if size <= _BASE:
        one = mx.eye(size)
        inverse, power = one - strict, strict
        for exponent in (2, 4):
            if exponent < size:
                power = power @ power
                inverse = inverse @ (one + power)
        return inverse
    half = _BASE
    while 2 * half < size:
        half *= 2
    first = _unit_lower_inverse(strict[..., :half, :half])
    second = _unit_lower_inverse(strict[..., half:, half:])
    corner = -(second @ strict[..., half:, :half]) @ first
    above = mx.zeros((*strict.shape[:-2], half, size - half))
    return mx.concatenate(
        [mx.concatenate([first, above], axis=-1), mx.concatenate([corner, second], axis=-1)], axis=-2
    )
