"""The projections of Qwen's gated delta rule layers, and the sizes of such a layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx


class Projected(NamedTuple):
    """The names are those of mlx-lm."""

    qkv: mx.array  # [rows, width, channels] inputs of the convolution: all queries, then keys, then values
    z: mx.array  # [rows, width, heads, value_dim] gates of the outputs, before silu
    b: mx.array  # [rows, width, heads] betas, before the sigmoid
    a: mx.array  # [rows, width, heads] gates of the state, before the bias and softplus


class LayerSizes(NamedTuple):
    """GPU kernels are compiled for these sizes."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    num_past: int  # inputs of earlier tokens that the convolution reads
    dtype: mx.Dtype
    parameter_dtypes: tuple[mx.Dtype, ...]  # of conv1d.weight, A_log, dt_bias, norm.weight

    @classmethod
    def of(cls, layer: Any, dtype: mx.Dtype) -> LayerSizes:
        return cls(
            layer.num_k_heads,
            layer.num_v_heads,
            layer.head_k_dim,
            layer.head_v_dim,
            layer.conv1d.weight.shape[1] - 1,
            dtype,
            (layer.conv1d.weight.dtype, layer.A_log.dtype, layer.dt_bias.dtype, layer.norm.weight.dtype),
        )

    @property
    def num_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def constants(self) -> dict[str, int]:
        """By their names in the kernels."""
        return {
            "KEY_HEADS": self.key_heads,
            "HEADS": self.heads,
            "KEY_DIM": self.key_dim,
            "VALUE_DIM": self.value_dim,
        }
