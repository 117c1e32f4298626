"""mlx-lm's Mamba-2 mixers with a state for each row: only the methods `_conv` and `_ssm` differ."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import falcon_h1, granitemoehybrid, mamba2, nemotron_h
from mlx_lm.models.cache import ArraysCache

from outrider.cpu import recurrence
from outrider.cpu.recurrence import TokenInputs
from outrider.models.recurrent.convolution import causal_convolution
from outrider.models.recurrent.reference_layer import native_outputs
from outrider.models.recurrent.state_space import chunk_ssm


class _Mamba2:
    def _conv(self: Any, conv_input: mx.array, cache: Any, mask: mx.array | None) -> mx.array:
        if isinstance(cache, ArraysCache):
            out: mx.array = super()._conv(conv_input, cache, mask)  # type: ignore[misc]
            return out
        return nn.silu(causal_convolution(self.conv1d, conv_input, cache, 0))

    def _ssm(
        self: Any, x: mx.array, in_keys: mx.array, out_keys: mx.array, steps: mx.array, cache: Any, mask: Any
    ) -> mx.array:
        if isinstance(cache, ArraysCache):
            out: mx.array = super()._ssm(x, in_keys, out_keys, steps, cache, mask)  # type: ignore[misc]
            return out
        rows, width, _ = x.shape
        x = x.reshape(rows, width, self.num_heads, self.head_dim)
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
        if cache is not None and recurrence.applies():
            inputs = TokenInputs(out_keys, in_keys, x, log_decays, steps, is_delta_rule=False)
            y = native_outputs(inputs, state, cache, 1)
        else:
            y, update = chunk_ssm(x, steps, log_decays, in_keys, out_keys, state)
            if cache is not None:
                cache.on_commit(1, lambda counts: update.state_after(counts.num))
        y = y.astype(x.dtype) + x * self.D.astype(x.dtype)[:, None]
        return y.reshape(rows, width, -1)


class NemotronHLayer(_Mamba2, nemotron_h.NemotronHMamba2Mixer):
    pass


class FalconH1Layer(_Mamba2, falcon_h1.FalconH1Mixer):
    pass


class GraniteLayer(_Mamba2, granitemoehybrid.GraniteMoeHybridMamba2Mixer):
    pass


class Mamba2Layer(_Mamba2, mamba2.Mamba2Block):
    pass
