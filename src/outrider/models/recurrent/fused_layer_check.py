"""Compares fused_layer with reference_layer in float32, on random inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_next import Qwen3NextRMSNormGated

from outrider.cache.placement import CommitCounts, Placement
from outrider.cache.recurrent import RecurrentState, StateSpec, StateView
from outrider.models.recurrent import reference_layer
from outrider.models.recurrent.layer_inputs import LayerSizes, Projected

Compute = Callable[[Any, Projected, StateView], mx.array]

ROWS, WIDTH = 3, 3
FED, COMMITTED = [WIDTH, WIDTH - 1, 0], [2, 0, 0]


def largest_error(compute: Compute, sizes: LayerSizes) -> float:
    """The largest error of outputs and states, with and without drafts, relative to their largest value."""
    layer = _RandomLayer(sizes)
    errors = []
    for commits_all in (True, False):
        got = layer.results(compute, commits_all)
        reference = partial(reference_layer.gated_outputs, kernels=False)
        want = layer.results(reference, commits_all, in_float32=True)
        errors += [_error(one, other) for one, other in zip(got, want, strict=True)]
    return float(mx.stack(errors).max())


class _RandomLayer:
    def __init__(self, sizes: LayerSizes) -> None:
        noise = iter(mx.random.split(mx.random.key(0), 16))

        def random(*shape: int, dtype: mx.Dtype = sizes.dtype) -> mx.array:
            return mx.random.normal(shape, key=next(noise)).astype(dtype)

        filters, rates, biases, norm = sizes.parameter_dtypes
        self._sizes = sizes
        self._projected = Projected(
            random(ROWS, WIDTH, sizes.num_channels),
            random(ROWS, WIDTH, sizes.heads, sizes.value_dim),
            random(ROWS, WIDTH, sizes.heads),
            random(ROWS, WIDTH, sizes.heads),
        )
        self._parameters = {
            "conv1d": random(sizes.num_channels, sizes.num_past + 1, 1, dtype=filters) / 2,
            "A_log": random(sizes.heads, dtype=rates),
            "dt_bias": random(sizes.heads, dtype=biases),
            "norm": random(sizes.value_dim, dtype=norm),
        }
        state_shape = (ROWS, sizes.heads, sizes.value_dim, sizes.key_dim)
        self._states = [
            random(ROWS, sizes.num_past, sizes.num_channels),
            random(*state_shape, dtype=mx.float32) / sizes.key_dim**0.5,
        ]

    def results(self, compute: Compute, commits_all: bool, in_float32: bool = False) -> list[mx.array]:
        """The outputs and the new states."""

        def given(x: mx.array) -> mx.array:
            return x.astype(mx.float32) if in_float32 else x

        spec = StateSpec(tuple(x.shape[1:] for x in self._states), (mx.float32, mx.float32))
        states = RecurrentState(spec)
        states.put([given(x) for x in self._states])
        layer = self._layer({name: given(x) for name, x in self._parameters.items()})
        starts, fed = mx.array([4, 5, 1]), mx.array(FED)
        place = Placement(range(ROWS), starts, fed, WIDTH, 8, 8, any_new=False, commits_all=commits_all)
        view = StateView(states, place)
        out = compute(layer, Projected(*(given(x) for x in self._projected)), view)
        view.commit(CommitCounts(mx.array(COMMITTED)))
        return [mx.where(place.fed[..., None, None], out, 0), *states.parts]

    def _layer(self, parameters: dict[str, mx.array]) -> Any:
        sizes = self._sizes
        conv = nn.Conv1d(sizes.num_channels, sizes.num_channels, 1, groups=sizes.num_channels, bias=False)
        norm = Qwen3NextRMSNormGated(sizes.value_dim, eps=0.01)  # large, so that the outputs' scale matters
        conv.weight, norm.weight = parameters["conv1d"], parameters["norm"]
        return SimpleNamespace(
            conv1d=conv,
            norm=norm,
            A_log=parameters["A_log"],
            dt_bias=parameters["dt_bias"],
            key_dim=sizes.key_heads * sizes.key_dim,
            num_k_heads=sizes.key_heads,
            num_v_heads=sizes.heads,
            head_k_dim=sizes.key_dim,
            head_v_dim=sizes.value_dim,
        )


def _error(got: mx.array, want: mx.array) -> mx.array:
    return mx.abs(got.astype(mx.float32) - want).max() / mx.maximum(mx.abs(want).max(), 1)
