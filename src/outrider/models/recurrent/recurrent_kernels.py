"""The gated delta rule in its recurrent form, as GPU kernels: token by token, with the state in registers.

    step     if all tokens are committed: reads each state once, writes the outputs and the new state
    window   if drafts may be rejected: writes the outputs, and the deltas instead of the new state
    commit   reads each state once, applies the deltas of the committed tokens, writes the new state

`step` and `commit` can also write the conv state of the layer. A group of 32 lanes holds one row of a head's
state, key_dim / 32 numbers in each lane. Prompts go token by token too: their heads keep a GPU busy, and the
chunked form launches some ten kernels for every 32 tokens (docs/LOG.md, "Prompts of hybrids on GPUs"). Other
devices and gates for each key dimension use `chunk_delta_rule`. Before the first use on a device the kernels
are compared with `chunk_delta_rule`. If the results differ, the kernels are not used, and a warning is
logged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import mlx.core as mx

from outrider import gpu_kernels
from outrider.gpu_kernels import LANES, GpuKernel
from outrider.models.recurrent.delta_rule import chunk_delta_rule

_TOLERANCE = 1e-2  # GPUs may round the inputs of chunk_delta_rule's matmuls to 10 bits (TF32)

_READ_STATE = """
    constexpr int PER_LANE = KEY_DIM / 32;
    const int value_row = group_y, head_row = group_z, tokens = keys_shape[1];
    const int row = head_row / HEADS, head = head_row % HEADS, key_head = head / (HEADS / KEY_HEADS);
    const int cell_at = (head_row * VALUE_DIM + value_row) * KEY_DIM + lane;
    float cell[PER_LANE];
    for (int i = 0; i < PER_LANE; ++i) cell[i] = state[cell_at + 32 * i];
"""
_WALK = """
    for (int t = 0; t < tokens; ++t) {
        const int token = row * tokens + t;
        const int key_at = (token * KEY_HEADS + key_head) * KEY_DIM + lane;
        const int value_at = (token * HEADS + head) * VALUE_DIM + value_row;
        const float gate = EXP((float)log_gates[token * HEADS + head]);
        float key[PER_LANE];
        float remembered = 0;
        for (int i = 0; i < PER_LANE; ++i) {
            key[i] = (float)keys[key_at + 32 * i];
            cell[i] *= gate;
            remembered += cell[i] * key[i];
        }
        remembered = GROUP_SUM(remembered);
        const float delta = (float)betas[token * HEADS + head] * ((float)values[value_at] - remembered);
        float read = 0;
        for (int i = 0; i < PER_LANE; ++i) {
            cell[i] = FMA(delta, key[i], cell[i]);
            read += cell[i] * (float)queries[key_at + 32 * i];
        }
        read = GROUP_SUM(read);
        if (lane == 0) {
            outputs[value_at] = read;
            NOTE_DELTA
        }
    }
"""
_APPLY = """
    for (int t = 0; t < num_committed[row]; ++t) {
        const int token = row * tokens + t;
        const int key_at = (token * KEY_HEADS + key_head) * KEY_DIM + lane;
        const float gate = EXP((float)log_gates[token * HEADS + head]);
        const float delta = deltas[(token * HEADS + head) * VALUE_DIM + value_row];
        for (int i = 0; i < PER_LANE; ++i) {
            cell[i] *= gate;
            cell[i] = FMA(delta, (float)keys[key_at + 32 * i], cell[i]);
        }
    }
"""
_WRITE_STATE = """
    for (int i = 0; i < PER_LANE; ++i) new_state[cell_at + 32 * i] = cell[i];
"""
# The lanes of a row write its conv state together: columns n .. n + NUM_PAST - 1 of past and inputs.
_WRITE_PAST = """
    const int of_row = (head * VALUE_DIM + value_row) * 32 + lane;
    for (int i = of_row; i < NUM_PAST * CHANNELS; i += HEADS * VALUE_DIM * 32) {
        const int column = num_committed[row] + i / CHANNELS, channel = i % CHANNELS;
        new_past[row * NUM_PAST * CHANNELS + i] = column < NUM_PAST
            ? past[(row * NUM_PAST + column) * CHANNELS + channel]
            : inputs[(row * tokens + column - NUM_PAST) * CHANNELS + channel];
    }
"""

_RULE = ("queries", "keys", "values", "log_gates", "betas", "state")
WINDOW = GpuKernel(
    "delta_window",
    _RULE,
    ("outputs", "deltas"),
    _READ_STATE + _WALK.replace("NOTE_DELTA", "deltas[value_at] = delta;"),
)
STEP = GpuKernel(
    "delta_step",
    _RULE,
    ("outputs", "new_state"),
    _READ_STATE + _WALK.replace("NOTE_DELTA", "") + _WRITE_STATE,
)
COMMIT = GpuKernel(
    "delta_commit",
    ("keys", "log_gates", "deltas", "state", "num_committed"),
    ("new_state",),
    _READ_STATE + _APPLY + _WRITE_STATE,
)


def _and_past(kernel: GpuKernel) -> GpuKernel:
    more = [name for name in ("num_committed", "past", "inputs") if name not in kernel.inputs]
    return replace(
        kernel,
        name=f"{kernel.name}_and_past",
        inputs=(*kernel.inputs, *more),
        outputs=(*kernel.outputs, "new_past"),
        body=kernel.body + _WRITE_PAST,
    )


STEP_AND_PAST, COMMIT_AND_PAST = _and_past(STEP), _and_past(COMMIT)


@dataclass(frozen=True)
class ConvolutionInputs:
    """The inputs of a layer's convolution, all of one dtype. The last few become the conv state."""

    past: mx.array  # [rows, num_past, channels]
    inputs: mx.array  # [rows, tokens, channels]

    @property
    def sizes(self) -> dict[str, int]:
        return {"NUM_PAST": self.past.shape[1], "CHANNELS": self.past.shape[2]}

    @property
    def output(self) -> tuple[tuple[int, ...], mx.Dtype]:
        return self.past.shape, self.past.dtype


@dataclass(frozen=True)
class WindowUpdate:
    """How a window of tokens changes the rows' states: the inputs of the commit kernels."""

    keys: mx.array
    log_gates: mx.array
    deltas: mx.array  # [rows, tokens, heads, value_dim]
    state: mx.array

    def state_after(self, num_tokens: mx.array) -> mx.array:
        (state,) = _run(COMMIT, self._inputs(num_tokens), self.keys, self.state, [_like(self.state)])
        return state

    def state_and_past_after(self, num_tokens: mx.array, seen: ConvolutionInputs) -> list[mx.array]:
        inputs = [*self._inputs(num_tokens), seen.past, seen.inputs]
        outputs = [_like(self.state), seen.output]
        return _run(COMMIT_AND_PAST, inputs, self.keys, self.state, outputs, seen.sizes)

    def _inputs(self, num_tokens: mx.array) -> list[mx.array]:
        return [self.keys, self.log_gates, self.deltas, self.state, num_tokens.astype(mx.int32)]


def window(
    queries: mx.array, keys: mx.array, values: mx.array, log_gates: mx.array, betas: mx.array, state: mx.array
) -> tuple[mx.array, WindowUpdate]:
    """Like `chunk_delta_rule`: outputs [rows, tokens, heads, value_dim] and how tokens change the state."""
    floats = values.shape, mx.float32
    inputs = [queries, keys, values, log_gates, betas, state]
    outputs, deltas = _run(WINDOW, inputs, keys, state, [floats, floats])
    return outputs, WindowUpdate(keys, log_gates, deltas, state)


def step(
    queries: mx.array, keys: mx.array, values: mx.array, log_gates: mx.array, betas: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Outputs, and the state after all tokens."""
    inputs = [queries, keys, values, log_gates, betas, state]
    outputs, state = _run(STEP, inputs, keys, state, [(values.shape, mx.float32), _like(state)])
    return outputs, state


def step_and_past(
    rule: Sequence[mx.array], num_fed: mx.array, seen: ConvolutionInputs
) -> tuple[mx.array, mx.array, mx.array]:
    """Outputs, the state after all tokens, and the new conv state. `rule`: the arguments of `step`."""
    _, keys, values, _, _, state = rule
    inputs = [*rule, num_fed.astype(mx.int32), seen.past, seen.inputs]
    outputs = [(values.shape, mx.float32), _like(state), seen.output]
    out, state, past = _run(STEP_AND_PAST, inputs, keys, state, outputs, seen.sizes)
    return out, state, past


def fits(keys: mx.array, values: mx.array, log_gates: mx.array) -> bool:
    """True if the kernels can compute this pass on this device."""
    return log_gates.ndim == 3 and keys.shape[-1] % LANES == 0 and gpu_kernels.is_available() and _agrees()


def _like(array: mx.array) -> tuple[tuple[int, ...], mx.Dtype]:
    return array.shape, array.dtype


def _run(
    kernel: GpuKernel,
    inputs: Sequence[mx.array],
    keys: mx.array,
    state: mx.array,
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
    more_sizes: dict[str, int] | None = None,
) -> list[mx.array]:
    rows, heads, value_dim, key_dim = state.shape
    sizes = {"HEADS": heads, "KEY_HEADS": keys.shape[2], "KEY_DIM": key_dim, "VALUE_DIM": value_dim}
    return gpu_kernels.run(kernel, inputs, sizes | (more_sizes or {}), (value_dim, rows * heads), outputs)


@cache
def _agrees() -> bool:
    """True if the kernels give what `chunk_delta_rule` gives on this device."""

    def error() -> float:
        rule = random_inputs()
        num_committed, all_committed = mx.array([0, 2]), mx.array([3, 3])
        want, update = chunk_delta_rule(*rule)
        got, kernel_update = window(*rule)
        stepped, after = step(*rule)
        pairs = [
            (got, want),
            (stepped, want),
            (after, update.state_after(all_committed)),
            (kernel_update.state_after(num_committed), update.state_after(num_committed)),
        ]
        return float(mx.stack([mx.abs(one - other).max() for one, other in pairs]).max())

    return gpu_kernels.is_close(error, "delta-rule", _TOLERANCE)


def random_inputs(num: int = 3) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array]:
    keys = mx.random.split(mx.random.key(0), len(_RULE))
    q, k, v, g, b, s = (
        mx.random.normal(shape, key=key)
        for shape, key in zip(
            [(2, num, 2, 64), (2, num, 2, 64), (2, num, 4, 16), (2, num, 4), (2, num, 4), (2, 4, 16, 64)],
            keys,
            strict=True,
        )
    )
    return q / 64, k / 8, v, -mx.abs(g), mx.sigmoid(b), s
