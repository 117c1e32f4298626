"""State space models (SSM, Mamba-2) in their chunked form: over a window or a prompt, no loop over tokens.

    S_t = e^(dt_t A) S_(t-1) + dt_t x_t B_t^T          y_t = S_t C_t + D x_t

This is the delta rule with deltas d_t = dt_t x_t that do not depend on the state: no system has to be solved.
"""

from __future__ import annotations

import mlx.core as mx

from outrider.models.recurrent.delta_rule import ChunkUpdate, by_heads, decayed_products, decays, repeated

CHUNK = 64  # tokens; chosen by hand


def chunk_ssm(
    inputs: mx.array,
    steps: mx.array,
    log_decays: mx.array,
    in_keys: mx.array,
    out_keys: mx.array,
    state: mx.array,
    chunk: int = CHUNK,
) -> tuple[mx.array, ChunkUpdate]:
    """Outputs [rows, tokens, heads, dim] without the D term, and how the last chunk changes the state.

    inputs [rows, tokens, heads, dim]; steps (dt), log_decays (dt A) [rows, tokens, heads], zero for padding;
    in_keys, out_keys (B, C) [rows, tokens, groups, state_size]; state [rows, heads, dim, state_size].
    """
    num_tokens, num_heads = inputs.shape[1], inputs.shape[2]
    size = min(chunk, num_tokens)
    repeats = num_heads // in_keys.shape[2]
    deltas = by_heads(steps[..., None] * inputs, size)  # [rows, heads, chunks, size, dim]
    k, q = by_heads(in_keys, size), by_heads(out_keys, size)
    decay, since = decays(by_heads(log_decays[..., None], size))
    own = decayed_products(q, k, since, repeats) @ deltas
    k = repeated(k, repeats)
    decayed_q = decay * repeated(q, repeats)
    outputs = []
    for i in range(deltas.shape[2]):
        outputs.append(own[:, :, i] + decayed_q[:, :, i] @ state.swapaxes(-1, -2))
        last = ChunkUpdate(state, k[:, :, i], deltas[:, :, i], decay[:, :, i], since[:, :, i], i * size)
        state = last.state_after_all()
    out = mx.concatenate(outputs, axis=2)
    return out[:, :, :num_tokens].swapaxes(1, 2), last
