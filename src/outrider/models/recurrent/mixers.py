"""mlx-lm's recurrent layers with a state per row: subclasses that the layers of a loaded model become.

`adopt` gives the layers of a model their new class; parameters stay where they are, and no module of mlx-lm
is changed. With mlx-lm's own caches an adopted layer does what it always did. With a StateView, and in a pass
without any cache, it computes without a loop over tokens.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import falcon_h1, granitemoehybrid, lfm2, lfm2_moe, mamba2, nemotron_h, qwen3_5, qwen3_next
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.gated_delta import normalize_qk

from outrider.models.recurrent.convolution import causal_convolution
from outrider.models.recurrent.delta_rule import delta_rule
from outrider.models.recurrent.state_space import state_space


class _GatedDeltaNet:
    """The mixer of Qwen3-Next and Qwen3.5: a short convolution, then the gated delta rule."""

    def __call__(self: Any, inputs: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if isinstance(cache, ArraysCache):
            out: mx.array = super().__call__(inputs, mask, cache)  # type: ignore[misc]
            return out
        rows, width, _ = inputs.shape
        qkv, z, b, a = self._projected(inputs)
        convolved = nn.silu(causal_convolution(self.conv1d, qkv, cache, 0))
        q, k, v = mx.split(convolved, [self.key_dim, 2 * self.key_dim], axis=-1)
        q, k = (x.reshape(rows, width, self.num_k_heads, self.head_k_dim) for x in (q, k))
        v = v.reshape(rows, width, self.num_v_heads, self.head_v_dim)
        q, k = normalize_qk(q, k, inv_scale=self.head_k_dim**-0.5, eps=1e-6)
        log_gates = -mx.exp(self.A_log.astype(mx.float32)) * nn.softplus(a + self.dt_bias)
        betas = mx.sigmoid(b)
        if cache is None:
            state = mx.zeros((rows, self.num_v_heads, self.head_v_dim, self.head_k_dim))
        else:
            state = cache[1]
            log_gates = mx.where(cache.fed[..., None], log_gates, 0)
            betas = mx.where(cache.fed[..., None], betas, 0)
        out, corrections = delta_rule(q, k, v, log_gates, betas, state)
        if cache is not None:
            cache.keep(1, corrections.state_after)
        out = self.out_proj(self.norm(out.astype(inputs.dtype), z).reshape(rows, width, -1))
        if getattr(self, "sharding_group", None) is not None:
            out = mx.distributed.all_sum(out, group=self.sharding_group)
        return out


class Qwen3NextMixer(_GatedDeltaNet, qwen3_next.Qwen3NextGatedDeltaNet):
    def _projected(self, inputs: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        rows, width, _ = inputs.shape
        q, k, v, z, b, a = self.fix_query_key_value_ordering(
            self.in_proj_qkvz(inputs), self.in_proj_ba(inputs)
        )
        qkv = mx.concatenate([x.reshape(rows, width, -1) for x in (q, k, v)], axis=-1)
        return qkv, z, b, a


class Qwen35Mixer(_GatedDeltaNet, qwen3_5.GatedDeltaNet):
    def _projected(self, inputs: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        rows, width, _ = inputs.shape
        z = self.in_proj_z(inputs).reshape(rows, width, self.num_v_heads, self.head_v_dim)
        return self.in_proj_qkv(inputs), z, self.in_proj_b(inputs), self.in_proj_a(inputs)


class _Mamba2:
    """Mamba-2 mixers: their `__call__` stays, their convolution and their state space know rows."""

    def _conv(self: Any, conv_input: mx.array, cache: Any, mask: mx.array | None) -> mx.array:
        if isinstance(cache, ArraysCache):
            out: mx.array = super()._conv(conv_input, cache, mask)  # type: ignore[misc]
            return out
        return nn.silu(causal_convolution(self.conv1d, conv_input, cache, 0))

    def _ssm(
        self: Any,
        hidden: mx.array,
        in_keys: mx.array,
        out_keys: mx.array,
        steps: mx.array,
        cache: Any,
        mask: Any,
    ) -> mx.array:
        if isinstance(cache, ArraysCache):
            out: mx.array = super()._ssm(hidden, in_keys, out_keys, steps, cache, mask)  # type: ignore[misc]
            return out
        rows, width, _ = hidden.shape
        x = hidden.reshape(rows, width, self.num_heads, self.head_dim)
        in_keys, out_keys = (
            keys.reshape(rows, width, self.n_groups, self.ssm_state_size) for keys in (in_keys, out_keys)
        )
        steps = mx.clip(nn.softplus(steps.astype(mx.float32) + self.dt_bias), *self.time_step_limit)
        if cache is None:
            state = mx.zeros((rows, self.num_heads, self.head_dim, self.ssm_state_size))
        else:
            state = cache[1].astype(mx.float32)
            steps = mx.where(cache.fed[..., None], steps, 0)
        log_decays = -mx.exp(self.A_log.astype(mx.float32)) * steps
        y, corrections = state_space(x, steps, log_decays, in_keys, out_keys, state)
        if cache is not None:
            cache.keep(1, corrections.state_after)
        y = y.astype(hidden.dtype) + x * self.D.astype(hidden.dtype)[:, None]
        return y.reshape(rows, width, -1)


class NemotronHMixer(_Mamba2, nemotron_h.NemotronHMamba2Mixer):
    pass


class FalconH1Mixer(_Mamba2, falcon_h1.FalconH1Mixer):
    pass


class GraniteMixer(_Mamba2, granitemoehybrid.GraniteMoeHybridMamba2Mixer):
    pass


class Mamba2Mixer(_Mamba2, mamba2.Mamba2Block):
    pass


class _ShortConv:
    """LFM2's gated convolution."""

    def __call__(self: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if isinstance(cache, ArraysCache):
            out: mx.array = super().__call__(x, mask, cache)  # type: ignore[misc]
            return out
        before, after, x = mx.split(self.in_proj(x), 3, axis=-1)
        return self.out_proj(after * causal_convolution(self.conv, before * x, cache, 0))


class Lfm2Mixer(_ShortConv, lfm2.ShortConv):
    pass


class Lfm2MoeMixer(_ShortConv, lfm2_moe.ShortConv):
    pass


_MIXERS: dict[type[nn.Module], type[nn.Module]] = {
    mixer.__mro__[2]: mixer
    for mixer in (
        Qwen3NextMixer, Qwen35Mixer, NemotronHMixer, FalconH1Mixer, GraniteMixer, Mamba2Mixer, Lfm2Mixer,
        Lfm2MoeMixer,
    )
}  # fmt: skip


def adopt(model: nn.Module) -> None:
    """Give every recurrent layer of a model the class here that knows rows."""
    for _, module in model.named_modules():
        if type(module) in _MIXERS:
            module.__class__ = _MIXERS[type(module)]
