"""A gated delta rule layer's parts, each a few operations of MLX: for any device and any width.

fused_layer does the same in a few kernels.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import normalize_qk

from outrider.cache.recurrent import StateView
from outrider.models.recurrent import window_kernel
from outrider.models.recurrent.convolution import causal_convolution
from outrider.models.recurrent.delta_rule import delta_rule
from outrider.models.recurrent.layer_inputs import Projected

EPSILON = 1e-6  # of the squared length of queries and keys


def gated_outputs(layer: Any, projected: Projected, view: StateView | None, kernels: bool = True) -> mx.array:
    """What a layer of Qwen's makes of its projections.  [rows, width, heads, value_dim]"""
    qkv, z, b, a = projected
    convolved = nn.silu(causal_convolution(layer.conv1d, qkv, view, 0))
    q, k, v = mx.split(convolved, [layer.key_dim, 2 * layer.key_dim], axis=-1)
    q, k = (heads(part, layer.num_k_heads) for part in (q, k))
    log_gates = log_gates_of(layer.A_log, a + layer.dt_bias)
    out = rule(q, k, heads(v, layer.num_v_heads), log_gates, mx.sigmoid(b), view, 1, kernels)
    gated: mx.array = layer.norm(out.astype(qkv.dtype), z)
    return gated


def heads(x: mx.array, num: int) -> mx.array:
    return x.reshape(*x.shape[:-1], num, -1)


def log_gates_of(log_rates: mx.array, steps: mx.array) -> mx.array:
    return -mx.exp(log_rates.astype(mx.float32)) * nn.softplus(steps)


def rule(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_gates: mx.array,
    betas: mx.array,
    view: StateView | None,
    part: int,
    kernels: bool = True,
) -> mx.array:
    """The delta rule from the rows' states (part `part` of the view), or from nothing.

    With `kernels` it is one where that fits.
    """
    q, k = normalize_qk(q, k, inv_scale=k.shape[-1] ** -0.5, eps=EPSILON)
    if view is None:
        state = mx.zeros((v.shape[0], v.shape[2], v.shape[3], k.shape[-1]))
        return delta_rule(q, k, v, log_gates, betas, state)[0]
    fed = view.fed[..., None]
    betas = mx.where(fed, betas, 0)
    log_gates = mx.where(fed if log_gates.ndim == 3 else fed[..., None], log_gates, 0)
    state = view[part]
    if not (kernels and window_kernel.fits(k, v, log_gates)):
        out, corrections = delta_rule(q, k, v, log_gates, betas, state)
        view.keep(part, lambda kept: corrections.state_after(kept.num))
    elif view.keeps_all:
        out, stepped = window_kernel.step(q, k, v, log_gates, betas, state)
        view.keep(part, lambda _: stepped)
    else:
        out, window = window_kernel.window(q, k, v, log_gates, betas, state)
        view.keep(part, lambda kept: window.state_after(kept.num))
    return out
