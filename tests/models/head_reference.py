"""The heads of all families in plain NumPy, from the published formulas and the published tensor names.

A block's tensors are a dict of the names that follow its prefix in the publisher's checkpoint, such as
"mlp.experts.3.up_proj.weight". Arrays are one row's: [cells, hidden], in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray
Weights = Mapping[str, Array]
EPS = 1e-5


@dataclass(frozen=True)
class Attention:
    """What differs between families that attend with queries, keys and values."""

    num_kv_heads: int = 2
    rope_dims: int = 16  # 0: no rope
    rope_pairs: bool = False  # turns (0, 1), (2, 3), ... instead of the two halves
    base: float = 10000.0
    is_gated: bool = False
    zero_centred: bool = False
    window: int | None = None
    value_scale: float = 1.0


def norm(x: Array, weight: Array, eps: float = EPS) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    share = np.exp(x - x.max(axis=-1, keepdims=True))
    return share / share.sum(axis=-1, keepdims=True)


def rope(x: Array, dims: int, base: float, pairs: bool) -> Array:
    """Turn the first `dims` of each head by its cell.  [cells, heads, dim]"""
    if dims == 0:
        return x
    angles = np.arange(len(x))[:, None] * base ** (-np.arange(0, dims, 2) / dims)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    turned = x.copy()
    one = np.s_[..., 0:dims:2] if pairs else np.s_[..., : dims // 2]
    two = np.s_[..., 1:dims:2] if pairs else np.s_[..., dims // 2 : dims]
    turned[one] = x[one] * cos - x[two] * sin
    turned[two] = x[one] * sin + x[two] * cos
    return turned


def mixed(q: Array, k: Array, v: Array, scale: float, window: int | None, sinks: Array | None) -> Array:
    """Causal attention.  q, k [cells, heads, dim], v [cells, heads, value dim]"""
    cells = np.arange(len(q))
    sees = cells[:, None] >= cells
    if window is not None:
        sees &= cells[:, None] - cells < window
    scores = np.where(sees, np.einsum("ihd,jhd->hij", q, k) * scale, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        share = softmax(np.concatenate([scores, column], axis=-1))[..., :-1]
    else:
        share = softmax(scores)
    return np.einsum("hij,jhd->ihd", share, v).reshape(len(q), -1)


def attention(w: Weights, x: Array, how: Attention, prefix: str = "self_attn.") -> Array:
    def projected(name: str) -> Array:
        return x @ w[f"{prefix}{name}.weight"].T + w.get(f"{prefix}{name}.bias", 0.0)

    cells, num_heads = len(x), 4
    q = projected("q_proj").reshape(cells, num_heads, -1)
    gate = 0.0
    if how.is_gated:
        q, gate = np.split(q, 2, axis=-1)
    k, v = (projected(name).reshape(cells, how.num_kv_heads, -1) for name in ("k_proj", "v_proj"))
    if f"{prefix}q_norm.weight" in w:
        one = 1.0 if how.zero_centred else 0.0
        q, k = norm(q, w[f"{prefix}q_norm.weight"] + one), norm(k, w[f"{prefix}k_norm.weight"] + one)
    q, k = (rope(y, how.rope_dims, how.base, how.rope_pairs) for y in (q, k))
    k, v = (y.repeat(num_heads // how.num_kv_heads, axis=1) for y in (k, v * how.value_scale))
    out = mixed(q, k, v, q.shape[-1] ** -0.5, how.window, w.get(f"{prefix}attention_sink_bias"))
    if how.is_gated:
        out = out * sigmoid(np.asarray(gate).reshape(cells, -1))
    return out @ w[f"{prefix}o_proj.weight"].T


def latent_attention(
    w: Weights, x: Array, norm_eps: float, q_scale: float = 1.0, kv_scale: float = 1.0
) -> Array:
    """Multi-head latent attention with 4 heads of 16 + 8 dimensions, values of 16 and a latent of 16."""
    p, cells, (heads, nope, turning, rank) = "self_attn.", len(x), (4, 16, 8, 16)
    q = norm(x @ w[f"{p}q_a_proj.weight"].T, w[f"{p}q_a_layernorm.weight"], norm_eps)
    q = (q @ w[f"{p}q_b_proj.weight"].T).reshape(cells, heads, nope + turning) * q_scale
    down = x @ w[f"{p}kv_a_proj_with_mqa.weight"].T
    latent = norm(down[:, :rank], w[f"{p}kv_a_layernorm.weight"], norm_eps) * kv_scale
    up = (latent @ w[f"{p}kv_b_proj.weight"].T).reshape(cells, heads, -1)
    k, v = up[..., :nope], up[..., nope:]
    q_turned = rope(q[..., nope:], turning, 10000.0, pairs=True)
    k_turned = rope(down[:, None, rank:], turning, 10000.0, pairs=True).repeat(heads, axis=1)
    q, k = np.concatenate([q[..., :nope], q_turned], -1), np.concatenate([k, k_turned], -1)
    return mixed(q, k, v, (nope + turning) ** -0.5, None, None) @ w[f"{p}o_proj.weight"].T


def mlp(w: Weights, x: Array, prefix: str = "mlp.") -> Array:
    gate, up, down = (w[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def relu2_mlp(w: Weights, x: Array, prefix: str) -> Array:
    return np.maximum(x @ w[f"{prefix}up_proj.weight"].T, 0) ** 2 @ w[f"{prefix}down_proj.weight"].T


def sigmoid_routed(w: Weights, x: Array, prefix: str = "mlp.", expert: Any = mlp) -> Array:
    """DeepSeek's experts: 4 in 2 groups, the better group's best 2; the bias is for the choice alone."""
    scores = sigmoid(x @ w[f"{prefix}gate.weight"].T)
    biased = scores + w[f"{prefix}gate.e_score_correction_bias"]
    out = expert(w, x, f"{prefix}shared_experts.")
    for cell in range(len(x)):
        groups = biased[cell].reshape(2, 2)
        groups[groups.sum(axis=1).argmin()] = 0.0  # as published: zero, which a negative score loses to
        chosen = np.argsort(-groups.ravel())[:2]
        weights = scores[cell, chosen] / scores[cell, chosen].sum() * 1.5
        for number, weight in zip(chosen, weights, strict=True):
            out[cell] += weight * expert(w, x[cell], f"{prefix}experts.{number}.")
    return out


def softmax_routed(w: Weights, x: Array) -> Array:
    """Qwen's experts: the best 2 of 4 by softmax, weights made to add up to 1, and a gated shared expert."""
    scores = softmax(x @ w["mlp.gate.weight"].T)
    out = sigmoid(x @ w["mlp.shared_expert_gate.weight"].T) * mlp(w, x, "mlp.shared_expert.")
    for cell in range(len(x)):
        chosen = np.argsort(-scores[cell])[:2]
        weights = scores[cell, chosen] / scores[cell, chosen].sum()
        for number, weight in zip(chosen, weights, strict=True):
            out[cell] += weight * mlp(w, x[cell], f"mlp.experts.{number}.")
    return out


def decoder(w: Weights, x: Array, attend: Any, feed_forward: Any, zero_centred: bool = False) -> Array:
    """The block that all but Nemotron-H have."""
    one = 1.0 if zero_centred else 0.0
    x = x + attend(w, norm(x, w["input_layernorm.weight"] + one))
    return x + feed_forward(w, norm(x, w["post_attention_layernorm.weight"] + one))


def _qwen(feed_forward: Any) -> Any:
    how = Attention(rope_dims=8, is_gated=True, zero_centred=True)
    return lambda w, x: decoder(w, x, lambda w, y: attention(w, y, how), feed_forward, zero_centred=True)


def _plain(how: Attention, feed_forward: Any = mlp) -> Any:
    return lambda w, x: decoder(w, x, lambda w, y: attention(w, y, how), feed_forward)


def _latent(norm_eps: float, feed_forward: Any, q_scale: float = 1.0, kv_scale: float = 1.0) -> Any:
    return lambda w, x: decoder(
        w, x, lambda w, y: latent_attention(w, y, norm_eps, q_scale, kv_scale), feed_forward
    )


def _nemotron_h(w: Weights, x: Array) -> Array:
    """An attention block without rope, then a block of experts."""
    first = norm(x, w["blocks.0.norm.weight"])
    x = x + attention(w, first, Attention(rope_dims=0), "blocks.0.mixer.")
    second = norm(x, w["blocks.1.norm.weight"])
    return x + sigmoid_routed(w, second, "blocks.1.mixer.", relu2_mlp)


BLOCKS = {
    "qwen3_5": _qwen(mlp),
    "qwen3_5_moe": _qwen(softmax_routed),
    "qwen3_next": _qwen(softmax_routed),
    "deepseek_v3": _latent(1e-6, sigmoid_routed),
    "deepseek_v32": _latent(1e-6, sigmoid_routed),
    "glm4_moe": _plain(Attention(rope_dims=8), sigmoid_routed),
    "glm4_moe_lite": _latent(EPS, sigmoid_routed),
    "mimo": _plain(Attention()),
    "mimo_v2_flash": _plain(Attention(num_kv_heads=4, rope_dims=8, base=5000.0, window=7, value_scale=0.7)),
    "ernie4_5": _plain(Attention(rope_pairs=True)),
    "ernie4_5_moe": _plain(Attention(rope_pairs=True)),
    "exaone_moe": _plain(Attention(rope_dims=0)),
    "longcat_flash": _latent(EPS, mlp, (64 / 24) ** 0.5, (64 / 16) ** 0.5),
    "nemotron_h": _nemotron_h,
}


def head_pass(family: str, w: Weights, hidden: Array, embedded: Array, final_norm: Array) -> Array:
    """A depth's outputs for pairs from the first cell on."""
    one = 1.0 if family.startswith("qwen") else 0.0
    parts = [norm(embedded, w["embedding_norm"] + one), norm(hidden, w["hidden_norm"] + one)]
    if family == "mimo":
        parts.reverse()
    x = np.concatenate(parts, axis=-1) @ w["fc"].T
    block = {name.removeprefix("block."): array for name, array in w.items() if name.startswith("block.")}
    x = BLOCKS[family](block, x)
    return norm(x, w["norm"] + one if "norm" in w else final_norm)
