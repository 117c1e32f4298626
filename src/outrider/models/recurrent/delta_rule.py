"""The gated delta rule over a window or a prompt, without a loop over tokens.

    d_t = b_t (v_t - S_(t-1) G_t k_t)          S_t = S_(t-1) G_t + d_t k_t^T          y_t = S_t q_t

G_t is a gate, one number for a head or one for each of its key dimensions. Within a chunk, with S the state
before it, S_t = S G_1..G_t + sum_(i<=t) d_i k_i^T G_(i+1)..G_t. So the corrections d solve one triangular
system (I + A) d = b (v - S G_1..G_t k), and both the outputs and the state after any number of tokens are
small sums over d. A window of drafts therefore keeps d and k, not a state for every position:
`Corrections.state_after` gives each row's own.

Tokens that are padding have b = 0 and log G = 0: they leave no trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

CHUNK = 32
CHUNK_BY_DIMENSION = 16  # with a gate for each key dimension, products cost a chunk's size more
_BASE = 8  # blocks up to this size are inverted by a short product, whose terms cannot grow large


@dataclass(frozen=True)
class Corrections:
    """What a chunk of tokens does to a state: enough to tell the state after any number of them."""

    state: mx.array  # [rows, heads, value_dim, key_dim] before the chunk, float32
    keys: mx.array  # [rows, heads, tokens, key_dim]
    deltas: mx.array  # [rows, heads, tokens, value_dim]
    decay: mx.array  # [rows, heads, tokens, 1 or key_dim] of the state, from the chunk's start to each token
    since: mx.array  # [rows, heads, tokens, tokens, 1 or key_dim] from one token to a later one
    offset: int = 0  # tokens of the pass before this chunk

    def state_after(self, num_tokens: mx.array) -> mx.array:
        """The rows' states when `num_tokens` [rows] of the pass stand."""
        num = mx.maximum(num_tokens - self.offset, 0)[:, None, None, None]
        last = mx.maximum(num - 1, 0)
        decay = mx.where(num > 0, mx.take_along_axis(self.decay, last, axis=2), 1)
        since = mx.take_along_axis(self.since, last[..., None], axis=2)[:, :, 0]
        return self._state(decay, mx.where(num > 0, since, 0))

    def state_after_all(self) -> mx.array:
        return self._state(self.decay[:, :, -1:], self.since[:, :, -1])

    def _state(self, decay: mx.array, since: mx.array) -> mx.array:
        return decay * self.state + self.deltas.swapaxes(-1, -2) @ (self.keys * since)


def delta_rule(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    log_gates: mx.array,
    betas: mx.array,
    state: mx.array,
    chunk: int | None = None,
) -> tuple[mx.array, Corrections]:
    """Outputs [rows, tokens, heads, value_dim], and what the tokens do to the state.

    queries, keys [rows, tokens, key_heads, key_dim], a key head for each group of heads; values
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
    fresh = solved @ (beta * v)  # the corrections if the state were zero
    seen = solved @ (beta * decay * k)  # what of the state enters them
    asked = decay * q
    outputs = []
    for i in range(v.shape[2]):
        turned = state.swapaxes(-1, -2)
        deltas = fresh[:, :, i] - seen[:, :, i] @ turned
        outputs.append(asked[:, :, i] @ turned + reads[:, :, i] @ deltas)
        last = Corrections(state, k[:, :, i], deltas, decay[:, :, i], since[:, :, i], i * size)
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


def repeated(x: mx.array, repeats: int) -> mx.array:
    """A key head for each of its group's heads."""
    return mx.repeat(x, repeats, axis=1) if repeats > 1 else x


def decays(log_gates: mx.array) -> tuple[mx.array, mx.array]:
    """What remains at token t of the state before the chunk, and of what came in at token i.

    [..., size, dim] -> [..., size, dim] and [..., size (t), size (i), dim], 0 where i > t. Logs between two
    tokens are added up, not taken as a difference of sums: a gate that forgets everything harms no other.
    """
    size = log_gates.shape[-2]
    after = mx.tril(mx.ones((size, size), mx.bool_), -1)[..., None]
    between = mx.cumsum(mx.where(after, log_gates[..., None, :], 0), axis=-3)
    not_before = mx.tril(mx.ones((size, size), mx.bool_))[..., None]
    return mx.exp(mx.cumsum(log_gates, axis=-2)), mx.where(not_before, mx.exp(between), 0)


def decayed_products(left: mx.array, right: mx.array, since: mx.array, repeats: int) -> mx.array:
    """sum over dimensions of left_t right_i since_(t, i).  [..., size, size]"""
    if since.shape[-1] == 1:
        return repeated(left @ right.swapaxes(-1, -2), repeats) * since[..., 0]
    left, right = repeated(left, repeats), repeated(right, repeats)
    return ((since * right[..., None, :, :]) @ left[..., None])[..., 0]


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
