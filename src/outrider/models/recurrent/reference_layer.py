"""The reference implementation of a gated delta rule layer, in operations of MLX: any device, any width.

fused_layer computes the same in a few GPU kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import normalize_qk

from outrider.cache.recurrent import StateView
from outrider.cpu import recurrence
from outrider.cpu.recurrence import TokenInputs
from outrider.models.recurrent import recurrent_kernels
from outrider.models.recurrent.convolution import causal_convolution
from outrider.models.recurrent.delta_rule import chunk_delta_rule
from outrider.models.recurrent.layer_inputs import Projected

EPSILON = 1e-6  # added to the squared length of queries and keys before they are normalised, as in mlx-lm


def gated_outputs(layer: Any, projected: Projected, view: StateView | None, kernels: bool = True) -> mx.array:
    """From the projections to the gated norm of a Qwen layer.  [rows, width, heads, value_dim]"""
    qkv, z, b, a = projected
    convolved = nn.silu(causal_convolution(layer.conv1d, qkv, view, 0))
    q, k, v = mx.split(convolved, [layer.key_dim, 2 * layer.key_dim], axis=-1)
    q, k = (split_heads(part, layer.num_k_heads) for part in (q, k))
    log_gates = log_gates_of(layer.A_log, a + layer.dt_bias)
    out = delta_rule(q, k, split_heads(v, layer.num_v_heads), log_gates, mx.sigmoid(b), view, 1, kernels)
    gated: mx.array = layer.norm(out.astype(qkv.dtype), z)
    return gated


def split_heads(x: mx.array, num: int) -> mx.array:
    return x.reshape(*x.shape[:-1], num, -1)


def log_gates_of(log_rates: mx.array, steps: mx.array) -> mx.array:
    return -mx.exp(log_rates.astype(mx.float32)) * nn.softplus(steps)


def delta_rule(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_gates: mx.array,
    betas: mx.array,
    view: StateView | None,
    part: int,
    kernels: bool = True,
) -> mx.array:
    """The delta rule from the rows' states (part `part` of the view), or from zero states without a view.

    `kernels`: use native operations or GPU kernels where they can compute this pass.
    """
    q, k = normalize_qk(q, k, inv_scale=k.shape[-1] ** -0.5, eps=EPSILON)
    if view is None:
        state = mx.zeros((v.shape[0], v.shape[2], v.shape[3], k.shape[-1]))
        return chunk_delta_rule(q, k, v, log_gates, betas, state)[0]
    fed = view.fed[..., None]
    betas = mx.where(fed, betas, 0)
    log_gates = mx.where(fed if log_gates.ndim == 3 else fed[..., None], log_gates, 0)
    state = view[part]
    has_kernels = kernels and recurrent_kernels.fits(k, v, log_gates)
    if kernels and not has_kernels and recurrence.applies():
        inputs = TokenInputs(q, k, v, log_gates, betas, is_delta_rule=True)
        return native_outputs(inputs, state, view, part)
    if not has_kernels:
        out, update = chunk_delta_rule(q, k, v, log_gates, betas, state)
        view.on_commit(part, lambda counts: update.state_after(counts.num))
    elif view.commits_all:
        out, stepped = recurrent_kernels.step(q, k, v, log_gates, betas, state)
        view.on_commit(part, lambda _: stepped)
    else:
        out, window = recurrent_kernels.window(q, k, v, log_gates, betas, state)
        view.on_commit(part, lambda counts: window.state_after(counts.num))
    return out


def native_outputs(inputs: TokenInputs, state: mx.array, view: StateView, part: int) -> mx.array:
    """The outputs of a pass on a CPU. Registers part `part` of the view's states."""
    if not view.commits_all:
        # Copies of what the commit needs: views would keep the whole pass in memory until then.
        copies = mx.contiguous(inputs.keys), mx.contiguous(inputs.values)
        inputs = replace(inputs, keys=copies[0], values=copies[1])
        kept = replace(inputs, queries=None)
        view.on_commit(part, lambda counts: kept.state_after(state, counts.num))
        return inputs.outputs(state)
    outputs, after_all = inputs.outputs_and_state(state, view.num_fed)
    view.on_commit(part, lambda _: after_all)
    return outputs
