"""The gated delta rule over a window or a prompt, without a loop over tokens.

    d_t = b_t (v_t - g_t S_(t-1) k_t)          S_t = g_t S_(t-1) + d_t k_t^T          y_t = S_t q_t

Within a chunk, S_t = e^(L_t) S + sum_(i<=t) e^(L_t - L_i) d_i k_i^T, where S is the state before it and L
the running sum of log g. So the corrections d solve one triangular system (I + A) d = b (v - e^L S k), and
both the outputs and the state after any number of tokens are small sums over d. A window of drafts therefore
keeps d and k, not a state for every position: `Corrections.state_after` gives each row's own.

Tokens that are padding have b = 0 and log g = 0: they leave no trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

CHUNK = 32
_BASE = 8  # blocks up to this size are inverted by a short product, whose terms cannot grow large


@dataclass(frozen=True)
class Corrections:
    """What a chunk of tokens does to a state: enough to tell the state after any number of them."""

    state: mx.array  # [rows, heads, value_dim, key_dim] before the chunk, float32
    keys: mx.array  # [rows, heads, tokens, key_dim]
    deltas: mx.array  # [rows, heads, tokens, value_dim]
    log_decay: mx.array  # [rows, heads, tokens] running sums of log g
    offset: int = 0  # tokens of the pass before this chunk

    def state_after(self, num_tokens: mx.array) -> mx.array:
        """The rows' states when `num_tokens` [rows] of the pass stand."""
        num = mx.maximum(num_tokens - self.offset, 0)[:, None, None]  # [rows, 1, 1]
        columns = mx.arange(self.log_decay.shape[-1])
        ends = mx.where(columns == num - 1, self.log_decay, 0).sum(axis=-1, keepdims=True)
        weights = mx.exp(mx.where(columns < num, ends - self.log_decay, -mx.inf))
        added = (self.deltas * weights[..., None]).swapaxes(-1, -2) @ self.keys
        return mx.exp(ends)[..., None] * self.state + added

    def state_after_all(self) -> mx.array:
        ends = self.log_decay[..., -1:]
        added = (self.deltas * mx.exp(ends - self.log_decay)[..., None]).swapaxes(-1, -2) @ self.keys
        return mx.exp(ends)[..., None] * self.state + added


def delta_rule(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    log_gates: mx.array,
    betas: mx.array,
    state: mx.array,
    chunk: int = CHUNK,
) -> tuple[mx.array, Corrections]:
    """Outputs [rows, tokens, heads, value_dim], and what the tokens do to the state.

    queries, keys [rows, tokens, key_heads, key_dim], a key head for each group of heads; values
    [rows, tokens, heads, value_dim]; log_gates, betas [rows, tokens, heads];
    state [rows, heads, value_dim, key_dim].
    """
    num_tokens, num_heads = values.shape[1], values.shape[2]
    size = min(chunk, num_tokens)
    repeats = num_heads // keys.shape[2]
    q, k, v = (by_heads(x, size) for x in (queries, keys, values))  # [rows, heads, chunks, size, dim]
    log_g, beta = (by_heads(x[..., None], size) for x in (log_gates, betas))  # [rows, heads, chunks, size, 1]
    ends = mx.cumsum(log_g, axis=-2)
    decay = decay_matrix(
        ends[..., 0]
    )  # [rows, heads, chunks, size, size], ones and less, zero above the diagonal
    products = mx.repeat(k @ k.swapaxes(-1, -2), repeats, axis=1)
    reads = mx.repeat(q @ k.swapaxes(-1, -2), repeats, axis=1) * decay
    solved = _unit_lower_inverse(mx.tril(beta * products * decay, -1))
    if repeats > 1:
        q, k = mx.repeat(q, repeats, axis=1), mx.repeat(k, repeats, axis=1)
    fresh = solved @ (beta * v)  # the corrections if the state were zero
    seen = solved @ (beta * mx.exp(ends) * k)  # what of the state enters them
    asked = mx.exp(ends) * q
    outputs = []
    for i in range(v.shape[2]):
        turned = state.swapaxes(-1, -2)
        deltas = fresh[:, :, i] - seen[:, :, i] @ turned
        outputs.append(asked[:, :, i] @ turned + reads[:, :, i] @ deltas)
        last = Corrections(state, k[:, :, i], deltas, ends[:, :, i, :, 0], i * size)
        state = last.state_after_all()  # never computed for the last one
    out = mx.concatenate(outputs, axis=2)
    return out[:, :, :num_tokens].swapaxes(1, 2), last


def by_heads(x: mx.array, size: int) -> mx.array:
    """[rows, tokens, heads, dim] -> [rows, heads, chunks, size, dim] in float32, zeros past the end."""
    x = x.swapaxes(1, 2).astype(mx.float32)
    missing = -x.shape[2] % size
    if missing:
        x = mx.pad(x, [(0, 0), (0, 0), (0, missing), (0, 0)])
    return x.reshape(*x.shape[:2], -1, size, x.shape[-1])


def decay_matrix(ends: mx.array) -> mx.array:
    """e^(L_t - L_i) for i <= t, else 0.  [..., size] -> [..., size, size]"""
    size = ends.shape[-1]
    below = mx.tril(mx.ones((size, size), mx.bool_))
    return mx.exp(mx.where(below, ends[..., :, None] - ends[..., None, :], -mx.inf))


def _unit_lower_inverse(strict: mx.array) -> mx.array:
    """(I + A)^-1 for strictly lower triangular A [..., n, n], by blocks whose size doubles.

    Small blocks: (I - A)(I + A^2)(I + A^4), as A^8 = 0. Two blocks B, D on the diagonal with C below B join
    to [[B^-1, 0], [-D^-1 C B^-1, D^-1]].
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
