"""Checks that must pass on this device before its times mean anything."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import mlx.core as mx

from outrider.models.recurrent import fused_layer, recurrent_kernels
from outrider.models.recurrent.delta_rule import chunk_delta_rule
from outrider.models.recurrent.fused_layer_check import largest_error
from outrider.models.recurrent.layer_inputs import LayerSizes


def window_kernels() -> dict[str, Any]:
    """The delta-rule kernels against the portable form: on the kernels' own trial, and at a real shape."""
    if mx.default_device() == mx.Device(mx.cpu):
        return {"used": False, "why": "no GPU"}
    found: dict[str, Any] = {"used": recurrent_kernels._agrees()}
    for name, shape in {"trial": None, "4b": (8, 4, 16, 32, 128, 128)}.items():
        inputs = recurrent_kernels.random_inputs() if shape is None else _inputs(*shape)
        rows, tokens = inputs[0].shape[:2]
        num_committed = mx.arange(rows) % (tokens + 1)
        want, update = chunk_delta_rule(*inputs)
        got, window = recurrent_kernels.window(*inputs)
        states = window.state_after(num_committed), update.state_after(num_committed)
        found[name] = {
            "outputs_off_by": float(mx.abs(got - want).max()),
            "states_off_by": float(mx.abs(states[0] - states[1]).max()),
            "outputs_size": float(mx.abs(want).max()),
            "states_size": float(mx.abs(states[1]).max()),
        }
    return found


def fused_layers() -> dict[str, Any]:
    """The fused delta-rule layer against the portable form in float32, at a real shape."""
    if mx.default_device() == mx.Device(mx.cpu):
        return {"used": False, "why": "no GPU"}
    found: dict[str, Any] = {}
    kinds = (mx.bfloat16, mx.bfloat16), (mx.bfloat16, mx.float32), (mx.float32, mx.float32)
    for dtype, norm in kinds:
        sizes = LayerSizes(16, 32, 128, 128, 3, dtype, (dtype, mx.float32, dtype, norm))
        name = " with a norm in ".join(str(one).removeprefix("mlx.core.") for one in (dtype, norm))
        found[name] = {
            "used": fused_layer._agrees(sizes),
            "off_by": largest_error(fused_layer.gated_outputs, sizes),
        }
    return found


def _inputs(
    rows: int, tokens: int, key_heads: int, heads: int, key_dim: int, value_dim: int
) -> tuple[mx.array, ...]:
    mx.random.seed(1)
    q, k = (mx.random.normal((rows, tokens, key_heads, key_dim)) / key_dim**0.5 for _ in range(2))
    v = mx.random.normal((rows, tokens, heads, value_dim))
    gates, betas = (mx.random.normal((rows, tokens, heads)) for _ in range(2))
    state = mx.random.normal((rows, heads, value_dim, key_dim))
    return q / key_dim**0.5, k, v, -mx.abs(gates), mx.sigmoid(betas), state


def exactness() -> dict[str, Any]:
    """Runs benchmarks.gpu.exactness."""
    return _in_own_process("benchmarks.gpu.exactness")


def shared_prefixes(is_tiny: bool) -> dict[str, Any]:
    """Runs benchmarks.gpu.shared_prefixes."""
    return _in_own_process("benchmarks.gpu.shared_prefixes", *(["--tiny"] if is_tiny else []))


def _in_own_process(module: str, *args: str) -> dict[str, Any]:
    """The JSON object in the last line that the module prints."""
    done = subprocess.run([sys.executable, "-m", module, *args], capture_output=True, text=True, timeout=240)
    if done.returncode != 0:
        raise RuntimeError(f"{module} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
