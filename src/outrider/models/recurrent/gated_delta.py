"""mlx-lm's gated delta rule layers with a state for each row: Qwen3-Next, Qwen3.5, OLMo, Kimi, Bailing.

A layer is a short causal convolution of queries, keys and values, then the delta rule, then a gated norm.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import bailing_moe_v3, kimi_linear, olmo_hybrid, qwen3_5, qwen3_next

from outrider.cache.recurrent import StateView
from outrider.models.recurrent import fused_layer, reference_layer
from outrider.models.recurrent.convolution import causal_convolution
from outrider.models.recurrent.layer_inputs import Projected
from outrider.models.recurrent.reference_layer import delta_rule, log_gates_of, split_heads
from outrider.models.recurrent.row_state_layer import RowStateLayer
from outrider.rank_sums import sum_over_ranks


class _Qwen(RowStateLayer):
    """Qwen's layers: one convolution for queries, keys and values together."""

    def _forward_rows(self: Any, x: mx.array, view: StateView | None) -> mx.array:
        projected = Projected(*self._projected(x))
        if view is not None and fused_layer.fits(self, projected):
            gated = fused_layer.gated_outputs(self, projected, view)
        else:
            gated = reference_layer.gated_outputs(self, projected, view)
        out = self.out_proj(gated.flatten(-2))
        if getattr(self, "sharding_group", None) is not None:
            out = sum_over_ranks(out, self.sharding_group)
        return out


class Qwen3NextLayer(_Qwen, qwen3_next.Qwen3NextGatedDeltaNet):
    def _projected(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        q, k, v, z, b, a = self.fix_query_key_value_ordering(self.in_proj_qkvz(x), self.in_proj_ba(x))
        qkv = mx.concatenate([part.flatten(-2) for part in (q, k, v)], axis=-1)
        return qkv, z, b, a


class Qwen35Layer(_Qwen, qwen3_5.GatedDeltaNet):
    def _projected(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        z = split_heads(self.in_proj_z(x), self.num_v_heads)
        return self.in_proj_qkv(x), z, self.in_proj_b(x), self.in_proj_a(x)


class OlmoLayer(RowStateLayer, olmo_hybrid.GatedDeltaNet):
    def _forward_rows(self: Any, x: mx.array, view: StateView | None) -> mx.array:
        q, k, v = (
            nn.silu(causal_convolution(conv, project(x), view, part))
            for part, (project, conv) in enumerate(
                ((self.q_proj, self.q_conv1d), (self.k_proj, self.k_conv1d), (self.v_proj, self.v_conv1d))
            )
        )
        q, k = (split_heads(part, self.num_k_heads) for part in (q, k))
        betas = mx.sigmoid(self.b_proj(x)) * (2 if self.allow_neg_eigval else 1)
        log_gates = log_gates_of(self.A_log, self.a_proj(x) + self.dt_bias)
        out = delta_rule(q, k, split_heads(v, self.num_v_heads), log_gates, betas, view, 3)
        gated = self.o_norm(out.astype(x.dtype), split_heads(self.g_proj(x), self.num_v_heads))
        return self.o_proj(gated.flatten(-2))


class _KimiDeltaAttention(RowStateLayer):
    """Kimi delta attention (KDA): a gate for each key dimension."""

    def _forward_rows(self: Any, x: mx.array, view: StateView | None) -> mx.array:
        q, k, v = (
            split_heads(nn.silu(causal_convolution(conv, project(x), view, part)), self.num_heads)
            for part, (project, conv) in enumerate(self._convolutions())
        )
        gates, out_gates = (split_heads(part, self.num_heads) for part in self._gates(x))
        log_gates = self._log_gates(gates, split_heads(self.dt_bias, self.num_heads))
        out = delta_rule(q, k, v, log_gates, mx.sigmoid(self.b_proj(x)), view, 3)
        out = self.o_norm(out.astype(x.dtype)) * mx.sigmoid(out_gates)
        return self.o_proj(out.flatten(-2))


class KimiLayer(_KimiDeltaAttention, kimi_linear.KimiDeltaAttention):
    def _convolutions(self) -> list[tuple[nn.Module, nn.Conv1d]]:
        return [
            (self.q_proj, self.q_conv.conv),
            (self.k_proj, self.k_conv.conv),
            (self.v_proj, self.v_conv.conv),
        ]

    def _gates(self, x: mx.array) -> tuple[mx.array, mx.array]:
        return self.f_b_proj(self.f_a_proj(x)), self.g_b_proj(self.g_a_proj(x))

    def _log_gates(self, gates: mx.array, bias: mx.array) -> mx.array:
        return log_gates_of(self.A_log.reshape(-1, 1), gates + bias)


class BailingLayer(_KimiDeltaAttention, bailing_moe_v3.BailingKDA):
    def _convolutions(self) -> list[tuple[nn.Module, nn.Conv1d]]:
        return [(self.q_proj, self.q_conv1d), (self.k_proj, self.k_conv1d), (self.v_proj, self.v_conv1d)]

    def _gates(self, x: mx.array) -> tuple[mx.array, mx.array]:
        return self.f_proj(x), self.g_proj(x)

    def _log_gates(self, gates: mx.array, bias: mx.array) -> mx.array:
        scale = mx.exp(self.A_log.astype(mx.float32)).reshape(-1, 1)
        return self.lower_bound * mx.sigmoid(scale * (gates.astype(mx.float32) + bias))
