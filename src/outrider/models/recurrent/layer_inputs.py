"""What a layer of Qwen's with a gated delta rule makes of its tokens first, and how large such a layer is."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx


class Projected(NamedTuple):
    qkv: mx.array  # [rows, width, channels] for the convolution: heads of queries, of keys, of values
    z: mx.array  # [rows, width, heads, value_dim] for the gate of the outputs
    b: mx.array  # [rows, width, heads] for betas
    a: mx.array  # [rows, width, heads] for the gates of the state


class LayerSizes(NamedTuple):
    """What kernels are compiled for."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    num_past: int  # inputs that the convolution sees besides a token's own
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
        """As kernels name them."""
        return {
            "KEY_HEADS": self.key_heads,
            "HEADS": self.heads,
            "KEY_DIM": self.key_dim,
            "VALUE_DIM": self.value_dim,
        }
