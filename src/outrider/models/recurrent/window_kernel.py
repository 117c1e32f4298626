"""The gated delta rule over a window of drafts as two GPU kernels, for Metal and CUDA from one source.

    window   reads each state once, walks over the window in registers, writes outputs and corrections
    commit   reads each state once, applies the corrections of the tokens that stand, writes it

A group of 32 lanes holds one row of a head's state, key_dim / 32 numbers a lane. Other devices, wider passes
and gates by key dimension use `delta_rule`. Before its first use on a device a kernel is compared with
`delta_rule`; if it does not agree it is not used, and the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from outrider.models.recurrent.delta_rule import delta_rule

log = logging.getLogger(__name__)

MAX_TOKENS = 16
_LANES = 32
_TOLERANCE = 1e-2  # GPUs may round the portable form's products to 10 bits
_INPUTS = ("queries", "keys", "values", "log_gates", "betas", "state")

# Where a lane finds itself, and the sum over the lanes of a group, in each language.
_METAL = """
    const int lane = thread_position_in_threadgroup.x;
    const int value_row = thread_position_in_grid.y;
    const int head_row = thread_position_in_grid.z;
    #define EXP(x) metal::exp(x)
    #define GROUP_SUM(x) simd_sum(x)
"""
_CUDA = """
    const int lane = threadIdx.x;
    const int value_row = blockIdx.y * blockDim.y + threadIdx.y;
    const int head_row = blockIdx.z * blockDim.z + threadIdx.z;
    #define EXP(x) expf(x)
    auto group_sum = [](float x) {
        for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
        return x;
    };
    #define GROUP_SUM(x) group_sum(x)
"""

_WINDOW = """
    constexpr int PER_LANE = KEY_DIM / 32;
    const int row = head_row / HEADS, head = head_row % HEADS, key_head = head / (HEADS / KEY_HEADS);
    const int first = lane * PER_LANE;
    const int cell_at = (head_row * VALUE_DIM + value_row) * KEY_DIM + first;
    float cell[PER_LANE];
    for (int i = 0; i < PER_LANE; ++i) cell[i] = state[cell_at + i];
    for (int t = 0; t < TOKENS; ++t) {
        const int token = row * TOKENS + t;
        const int key_at = (token * KEY_HEADS + key_head) * KEY_DIM + first;
        const int value_at = (token * HEADS + head) * VALUE_DIM + value_row;
        const float gate = EXP((float)log_gates[token * HEADS + head]);
        float remembered = 0;
        for (int i = 0; i < PER_LANE; ++i) {
            cell[i] *= gate;
            remembered += cell[i] * (float)keys[key_at + i];
        }
        remembered = GROUP_SUM(remembered);
        const float delta = (float)betas[token * HEADS + head] * ((float)values[value_at] - remembered);
        float read = 0;
        for (int i = 0; i < PER_LANE; ++i) {
            cell[i] += delta * (float)keys[key_at + i];
            read += cell[i] * (float)queries[key_at + i];
        }
        read = GROUP_SUM(read);
        if (lane == 0) {
            outputs[value_at] = read;
            deltas[value_at] = delta;
        }
    }
"""

_COMMIT = """
    constexpr int PER_LANE = KEY_DIM / 32;
    const int row = head_row / HEADS, head = head_row % HEADS, key_head = head / (HEADS / KEY_HEADS);
    const int first = lane * PER_LANE;
    const int cell_at = (head_row * VALUE_DIM + value_row) * KEY_DIM + first;
    float cell[PER_LANE];
    for (int i = 0; i < PER_LANE; ++i) cell[i] = state[cell_at + i];
    for (int t = 0; t < num_kept[row]; ++t) {
        const int token = row * TOKENS + t;
        const int key_at = (token * KEY_HEADS + key_head) * KEY_DIM + first;
        const float gate = EXP((float)log_gates[token * HEADS + head]);
        const float delta = deltas[(token * HEADS + head) * VALUE_DIM + value_row];
        for (int i = 0; i < PER_LANE; ++i) cell[i] = cell[i] * gate + delta * (float)keys[key_at + i];
    }
    for (int i = 0; i < PER_LANE; ++i) new_state[cell_at + i] = cell[i];
"""


@dataclass(frozen=True)
class Window:
    """What a window of tokens does to the rows' states, as the commit kernel wants it."""

    keys: mx.array
    log_gates: mx.array
    deltas: mx.array  # [rows, tokens, heads, value_dim]
    state: mx.array

    def state_after(self, num_tokens: mx.array) -> mx.array:
        inputs = [self.keys, self.log_gates, self.deltas, self.state, num_tokens.astype(mx.int32)]
        (state,) = _run(_kernel("commit"), inputs, self.keys, self.state, [self.state.shape])
        return state


def fits(keys: mx.array, values: mx.array, log_gates: mx.array) -> bool:
    """Whether the kernels can do this pass on this device."""
    is_gpu = mx.default_device() == mx.Device(mx.gpu)
    return (
        keys.shape[1] <= MAX_TOKENS
        and log_gates.ndim == 3
        and keys.shape[-1] % _LANES == 0
        and values.shape[-1] % _rows_per_group(values.shape[-1]) == 0
        and is_gpu
        and (mx.metal.is_available() or mx.cuda.is_available())
        and _agrees()
    )


def window(
    queries: mx.array, keys: mx.array, values: mx.array, log_gates: mx.array, betas: mx.array, state: mx.array
) -> tuple[mx.array, Window]:
    """As `delta_rule`: outputs [rows, tokens, heads, value_dim], and what the tokens do to the state."""
    inputs = [queries, keys, values, log_gates, betas, state]
    outputs, deltas = _run(_kernel("window"), inputs, keys, state, [values.shape, values.shape])
    return outputs, Window(keys, log_gates, deltas, state)


def _run(
    kernel: Any, inputs: list[mx.array], keys: mx.array, state: mx.array, shapes: Sequence[tuple[int, ...]]
) -> list[mx.array]:
    _, num_tokens, key_heads, key_dim = keys.shape
    rows, heads, value_dim, _ = state.shape
    outputs: list[mx.array] = kernel(
        inputs=inputs,
        template=[
            ("TOKENS", num_tokens),
            ("HEADS", heads),
            ("KEY_HEADS", key_heads),
            ("KEY_DIM", key_dim),
            ("VALUE_DIM", value_dim),
        ],
        grid=(_LANES, value_dim, rows * heads),
        threadgroup=(_LANES, _rows_per_group(value_dim), 1),
        output_shapes=list(shapes),
        output_dtypes=[mx.float32] * len(shapes),
    )
    return outputs


def _rows_per_group(value_dim: int) -> int:
    return min(4, value_dim)


@cache
def _kernel(name: str) -> Any:
    body, inputs, outputs = {
        "window": (_WINDOW, _INPUTS, ("outputs", "deltas")),
        "commit": (_COMMIT, ("keys", "log_gates", "deltas", "state", "num_kept"), ("new_state",)),
    }[name]
    make, start = (mx.fast.metal_kernel, _METAL) if mx.metal.is_available() else (mx.fast.cuda_kernel, _CUDA)
    return make(
        name=f"outrider_delta_{name}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=start + body,
    )


@cache
def _agrees() -> bool:
    """Whether the kernels give what `delta_rule` gives, on this device, today."""
    inputs = _trial()
    num_kept = mx.array([0, 2])
    want, corrections = delta_rule(*inputs)
    try:
        got, kernel_corrections = window(*inputs)
        states = kernel_corrections.state_after(num_kept), corrections.state_after(num_kept)
        error = float(mx.maximum(mx.abs(got - want).max(), mx.abs(states[0] - states[1]).max()))
    except RuntimeError as reason:
        log.warning(
            "The delta-rule kernels cannot be built on this device (%s): slower, portable form.", reason
        )
        return False
    if not error <= _TOLERANCE:  # or not a number
        log.warning("The delta-rule kernels are off by %.1e on this device: slower, portable form.", error)
        return False
    return True


def _trial() -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array]:
    keys = mx.random.split(mx.random.key(0), len(_INPUTS))
    q, k, v, g, b, s = (
        mx.random.normal(shape, key=key)
        for shape, key in zip(
            [(2, 3, 2, 64), (2, 3, 2, 64), (2, 3, 4, 16), (2, 3, 4), (2, 3, 4), (2, 4, 16, 64)],
            keys,
            strict=True,
        )
    )
    return q / 64, k / 8, v, -mx.abs(g), mx.sigmoid(b), s
