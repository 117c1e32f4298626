"""A Qwen gated delta rule layer over a short window, from its projections to its gated norm, as GPU kernels.

    prepare   convolution, normalised queries and keys, gates and betas; a lane group for each head and token
    rule      the delta rule: see recurrent_kernels
    gate      the gated norm of a head's outputs

reference_layer needs about twenty kernels for this, each shorter than its launch. The kernels compute in
float32. Layers that do not fit use reference_layer. Before the first use with a layer's sizes the kernels are
compared with reference_layer. If the results differ, the kernels are not used, and a warning is logged.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from outrider import gpu_kernels
from outrider.cache.recurrent import StateView
from outrider.gpu_kernels import LANES, GpuKernel
from outrider.models.recurrent import recurrent_kernels
from outrider.models.recurrent.fused_layer_check import largest_error
from outrider.models.recurrent.layer_inputs import LayerSizes, Projected
from outrider.models.recurrent.recurrent_kernels import ConvolutionInputs

# Of a window. Wider passes use reference_layer with the rule's kernels: on an H200 512 tokens of Qwen3.5-4B's
# shape took as long, and 2,048 took 85 ms instead of 101.
MAX_TOKENS = 16
_TOLERANCE = {mx.float32: 1e-2, mx.bfloat16: 5e-2, mx.float16: 2e-2}  # absolute, for results around 1

PREPARE = GpuKernel(
    "delta_prepare",
    ("qkv", "past", "filters", "a", "b", "log_rates", "dt_bias", "num_fed"),
    ("queries", "keys", "values", "log_gates", "betas", "inputs"),
    """
    constexpr int KEYS = 2 * KEY_HEADS, CHANNELS = KEYS * KEY_DIM + HEADS * VALUE_DIM;
    constexpr int MOST = (KEY_DIM > VALUE_DIM ? KEY_DIM : VALUE_DIM) / 32;
    const int tokens = qkv_shape[1], token = group_z, row = token / tokens, t = token % tokens;
    const bool is_value = group_y >= KEYS;  // before: heads of queries, then of keys
    const int first = is_value ? KEYS * KEY_DIM + (group_y - KEYS) * VALUE_DIM : group_y * KEY_DIM;
    const int per_lane = (is_value ? VALUE_DIM : KEY_DIM) / 32;
    float x[MOST];
    float squares = 0;
    for (int i = 0; i < per_lane; ++i) {
        const int channel = first + lane + 32 * i;
        const int now = row * qkv_strides[0] + t * qkv_strides[1] + channel * qkv_strides[2];
        inputs[token * CHANNELS + channel] = qkv[now];
        float sum = 0;
        for (int j = 0; j <= NUM_PAST; ++j) {
            const int before = NUM_PAST - j;  // tokens before this one
            const float seen = before > t
                ? (float)past[row * past_strides[0] + (t + j) * past_strides[1] + channel * past_strides[2]]
                : (float)qkv[now - before * qkv_strides[1]];
            sum = FMA((float)filters[channel * filters_strides[0] + j * filters_strides[1]], seen, sum);
        }
        x[i] = sum / (1 + EXP(-sum));
        squares = FMA(x[i], x[i], squares);
    }
    if (is_value) {
        const int head = group_y - KEYS, at = token * HEADS + head;
        for (int i = 0; i < per_lane; ++i) values[at * VALUE_DIM + lane + 32 * i] = x[i];
        if (lane == 0) {
            const bool is_fed = t < num_fed[row];
            const int a_at = row * a_strides[0] + t * a_strides[1] + head * a_strides[2];
            const int b_at = row * b_strides[0] + t * b_strides[1] + head * b_strides[2];
            const float step = (float)a[a_at] + (float)dt_bias[head];
            const float e = EXP(step > 0 ? -step : step);
            const float rest = e < 0.02f ? e * (1 - e * (1 / 2.0f - e * (1 / 3.0f - e / 4))) : LOG(1 + e);
            const float softplus = (step > 0 ? step : 0) + rest;
            log_gates[at] = is_fed ? -EXP((float)log_rates[head]) * softplus : 0;
            betas[at] = is_fed ? 1 / (1 + EXP(-(float)b[b_at])) : 0;
        }
    } else {
        const float length = SQRT(GROUP_SUM(squares) + 1e-6f);
        const bool is_key = group_y >= KEY_HEADS;
        const float scale = 1 / (is_key ? length : length * SQRT((float)KEY_DIM));
        const int at = (token * KEY_HEADS + group_y % KEY_HEADS) * KEY_DIM + lane;
        for (int i = 0; i < per_lane; ++i) {
            if (is_key) keys[at + 32 * i] = x[i] * scale;
            else queries[at + 32 * i] = x[i] * scale;
        }
    }
    """,
    strided=("qkv", "past", "filters", "a", "b"),  # parts of a merged matmul, of the cache, and other views
)

GATE = GpuKernel(
    "delta_gate",
    ("outputs", "z", "weight", "epsilon"),
    ("gated",),
    """
    constexpr int PER_LANE = VALUE_DIM / 32;
    const int token = group_z, row = token / z_shape[1], t = token % z_shape[1], head = group_y;
    const int at = (token * HEADS + head) * VALUE_DIM + lane;
    const int z_at = row * z_strides[0] + t * z_strides[1] + head * z_strides[2];
    float x[PER_LANE];
    float squares = 0;
    for (int i = 0; i < PER_LANE; ++i) {
        x[i] = (float)(GATED_TYPE)outputs[at + 32 * i];
        squares = FMA(x[i], x[i], squares);
    }
    const float scale = 1 / SQRT(GROUP_SUM(squares) / VALUE_DIM + epsilon[0]);
    for (int i = 0; i < PER_LANE; ++i) {
        const float normed = ROUNDS ? (float)(GATED_TYPE)(x[i] * scale) : x[i] * scale;
        const float exact = (float)weight[lane + 32 * i] * normed;
        const float weighed = ROUNDS ? (float)(GATED_TYPE)exact : exact;
        const float gate = (float)z[z_at + (lane + 32 * i) * z_strides[3]];
        gated[at + 32 * i] = (GATED_TYPE)(gate / (1 + EXP(-gate)) * weighed);
    }
    """,
    strided=("z",),
    contiguous=("outputs",),
)


def fits(layer: Any, projected: Projected) -> bool:
    """True if the kernels can compute this pass of this layer on this device."""
    qkv = projected.qkv
    if qkv.shape[1] > MAX_TOKENS or not gpu_kernels.is_available():
        return False
    conv, sizes = layer.conv1d, LayerSizes.of(layer, qkv.dtype)
    return (
        sizes.key_dim % LANES == 0
        and sizes.value_dim % LANES == 0
        and sizes.dtype in _TOLERANCE
        and qkv.shape[-1] == sizes.num_channels
        and conv.weight.shape == (sizes.num_channels, sizes.num_past + 1, 1)
        and "bias" not in conv
        and {sizes.dtype} == {x.dtype for x in projected}
        and layer.norm.weight.dtype in (sizes.dtype, mx.float32)
        and _agrees(sizes)
    )


def gated_outputs(layer: Any, projected: Projected, view: StateView) -> mx.array:
    """The same as `reference_layer.gated_outputs`."""
    qkv, z, b, a = projected
    rows, width, _ = qkv.shape
    sizes = LayerSizes.of(layer, qkv.dtype)
    past, state = view[0].astype(qkv.dtype), view[1]
    num_fed = view.num_fed.astype(mx.int32)
    keys, values, gates = (
        ((rows, width, *shape), mx.float32)
        for shape in ((sizes.key_heads, sizes.key_dim), (sizes.heads, sizes.value_dim), (sizes.heads,))
    )
    q, k, v, log_gates, betas, inputs = gpu_kernels.run(
        PREPARE,
        [qkv, past, layer.conv1d.weight, a, b, layer.A_log, layer.dt_bias, num_fed],
        sizes.constants | {"NUM_PAST": sizes.num_past},
        (2 * sizes.key_heads + sizes.heads, rows * width),
        [keys, keys, values, gates, gates, (qkv.shape, qkv.dtype)],
    )
    rule, seen = (q, k, v, log_gates, betas, state), ConvolutionInputs(past, inputs)
    if view.commits_all:
        out, new_state, new_past = recurrent_kernels.step_and_past(rule, num_fed, seen)
        view.on_commit_all(lambda _: [new_past, new_state])
    else:
        out, update = recurrent_kernels.window(*rule)
        view.on_commit_all(lambda counts: update.state_and_past_after(counts.num, seen)[::-1])
    (gated,) = gpu_kernels.run(
        GATE,
        [out, z, layer.norm.weight, mx.array([layer.norm.eps], mx.float32)],
        {
            "HEADS": sizes.heads,
            "VALUE_DIM": sizes.value_dim,
            "ROUNDS": int(layer.norm.weight.dtype == qkv.dtype),  # MLX's norm rounds to its inputs' type
        },
        (sizes.heads, rows * width),
        [(z.shape, qkv.dtype)],
    )
    return gated


@cache
def _agrees(sizes: LayerSizes) -> bool:
    """True if the kernels give what reference_layer gives in float32, for these sizes, on this device."""
    return gpu_kernels.is_close(
        lambda: largest_error(gated_outputs, sizes), "delta-layer", _TOLERANCE[sizes.dtype]
    )
